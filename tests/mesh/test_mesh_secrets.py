"""Keys and secrets of a real mesh: none is written where others read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

import aiohttp
import psutil
import pytest
import redis
import requests
from mesh_process import SMALL_MESH, MeshProcess, clean_environ, running_mesh

from pagemesh.shared.errors import HandshakeRefused
from pagemesh.shared.link import dial
from pagemesh.shared.messages import Hello
from pagemesh.shared.wire import PROTOCOL

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
SECRETS: Final = {
    "api_key": "hidden-client-key",
    "admin_key": "hidden-admin-key",
    "mesh_secret": "hidden-mesh-secret",
}
OFFERED: Final = "hidden-wrong-guess"
SERVICES: Final = ("gateway", "tokenizer", "scheduler", "worker")


class Keyed(NamedTuple):
    """A mesh whose keys stand in the file `config`."""

    mesh: MeshProcess
    config: Path

    @property
    def redis_url(self) -> str:
        return self.mesh.child("worker").environ()["PAGEMESH_REDIS_URL"]

    def hidden(self) -> list[str]:
        """What must be seen nowhere."""
        [password] = parse_qs(urlsplit(self.redis_url).query)["password"]
        return [*SECRETS.values(), OFFERED, password]

    def addresses(self) -> dict[str, str]:
        lines = map(json.loads, self.mesh.log.read_text().splitlines())
        return {line["service"]: line["address"] for line in lines if line["event"] == "listening"}


@pytest.fixture(scope="module")
def keyed(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    assert smollm2_folder.is_dir()
    folder = tmp_path_factory.mktemp("keyed")
    config = folder / "settings.yaml"
    config.write_text(json.dumps(SECRETS))
    with running_mesh(folder, *SMALL_MESH, "--config", str(config)) as mesh:
        yield Keyed(mesh, config)


def asked(keyed: Keyed, key: str, path: str = "/v1/completions") -> requests.Response:
    body = {"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 4}
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(keyed.mesh.base_url + path, json=body, headers=headers, timeout=100)


async def use_and_misuse(keyed: Keyed) -> list[str]:
    """The texts of every kind of answer, refusals of links among them."""
    good = asked(keyed, SECRETS["api_key"])
    assert good.status_code == 200
    answers = [good]
    for key in (OFFERED, SECRETS["admin_key"], SECRETS["mesh_secret"]):
        answers += [asked(keyed, key), asked(keyed, key, "/nowhere"), asked(keyed, key, "/admin/x")]
    texts = [answer.text for answer in answers]
    async with aiohttp.ClientSession() as session:
        for service in SERVICES[1:]:
            hello = Hello(PROTOCOL, "stranger", "stranger-1", 1, OFFERED)
            with pytest.raises(HandshakeRefused) as refused:
                await dial(session, keyed.addresses()[service], hello)
            texts.append(str(refused.value))
    return texts


def metrics(keyed: Keyed) -> dict[str, str]:
    """By place; nobody needs a key for them."""
    addresses = keyed.addresses()
    assert addresses.keys() == set(SERVICES)
    return {
        f"/metrics of the {service}": requests.get(f"http://{address}/metrics", timeout=10).text
        for service, address in addresses.items()
    }


def config_show(keyed: Keyed) -> str:
    command = [sys.executable, "-m", "pagemesh.cli", "config", "show", "--config", keyed.config]
    environ = {**clean_environ(), "PAGEMESH_REDIS_URL": keyed.redis_url}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.count("********") == len(SECRETS) + 1
    return done.stdout + done.stderr


def command_lines(keyed: Keyed) -> list[str]:
    processes = [psutil.Process(keyed.mesh.process.pid), *keyed.mesh.children()]
    assert len(processes) > len(SERVICES)
    return [" ".join(process.cmdline()) for process in processes]


def registry_contents(keyed: Keyed) -> str:
    """The values of the mesh, which every client of the registry may read."""
    with redis.Redis.from_url(keyed.redis_url, decode_responses=True) as client:
        keys = list(client.scan_iter(_type="string"))
        assert keys
        return "\n".join(str(client.get(key)) for key in keys)


async def test_no_key_and_no_secret_is_written_anywhere(keyed: Keyed) -> None:
    places = {"answers": "\n".join(await use_and_misuse(keyed))}
    places |= metrics(keyed)
    places["command lines"] = "\n".join(command_lines(keyed))
    places["registry"] = registry_contents(keyed)
    places["config show"] = config_show(keyed)
    places["log"] = keyed.mesh.log.read_text()
    assert "listening" in places["log"]
    for secret in keyed.hidden():
        assert len(secret) > 8
        for place, text in places.items():
            assert secret not in text, f"{place} shows a secret"
