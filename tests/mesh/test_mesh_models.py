"""One mesh of two real models: each by its name, an alias, a split, changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import requests
from mesh_parts import RECOVERY_S, Part, parts_of
from mesh_process import MeshProcess, running_mesh, wait_until
from tiny_llama import save_tiny_llama

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
LARGE: Final = "smollm2-135m-instruct"
ADMIN: Final = {"Authorization": "Bearer admin"}
SEEN_S: Final = 3.0


@pytest.fixture(scope="module")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Of this module alone, to be hurt."""
    assert smollm2_folder.is_dir()
    folder = tmp_path_factory.mktemp("models")
    tiny = save_tiny_llama(folder / "tiny-files")
    with running_mesh(
        folder,
        *(LARGE, f"tiny={tiny}"),
        *("--dtype", "float32", "--kv-cache-memory", "64MiB", "--log-level", "debug"),
        *("--routes", "fast=tiny", f"chat={LARGE}:0.5,tiny:0.5"),
        *("--admin-key", "admin", "--gateways", "2", "--cache-dir", str(folder / "cache")),
    ) as running:
        yield running


def ask(url: str, model: str, **fields: Any) -> requests.Response:
    body = {"model": model, "prompt": "a page table", "max_tokens": 4, "temperature": 0, **fields}
    return requests.post(f"{url}/v1/completions", json=body, timeout=60)


def text_of(url: str, model: str, **fields: Any) -> str:
    answer = ask(url, model, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def texts(mesh: MeshProcess) -> dict[str, str]:
    """What each model says, by its own name."""
    texts = {model: text_of(mesh.base_url, model) for model in (LARGE, "tiny")}
    assert texts[LARGE] != texts["tiny"]
    return texts


def listed(gateway: Part) -> dict[str, Any]:
    """What it shows of each model."""
    models = requests.get(f"{gateway.url}/v1/models", timeout=10).json()["data"]
    return {each["id"]: each for each in models}


def admin(gateway: Part, method: str, path: str = "", body: Any = None) -> requests.Response:
    url = f"{gateway.url}/admin/routes{path}"
    return requests.request(method, url, json=body, headers=ADMIN, timeout=10)


def test_an_alias_and_a_split_lead_to_the_models(mesh: MeshProcess, texts: dict[str, str]) -> None:
    assert text_of(mesh.base_url, "fast") == texts["tiny"]
    users = [f"user-{i}" for i in range(8)]
    said = [text_of(mesh.base_url, "chat", user=user) for user in users]
    assert set(said) == set(texts.values())
    for gateway in parts_of(mesh, "gateway"):
        assert [text_of(gateway.url, "chat", user=user) for user in users] == said
    assert {name: each["parent"] for name, each in listed(gateway).items()} == {
        LARGE: None,
        "tiny": None,
        "fast": "tiny",
        "chat": LARGE,
    }


def test_an_unknown_model_is_404(mesh: MeshProcess) -> None:
    answer = ask(mesh.base_url, "nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert LARGE in answer.json()["error"]["message"]


def test_a_route_changes_at_every_gateway_while_it_runs(
    mesh: MeshProcess, texts: dict[str, str]
) -> None:
    one, other = parts_of(mesh, "gateway")
    assert admin(one, "PUT", "/fast", {"targets": LARGE}).json()["source"] == "run time"
    assert text_of(one.url, "fast") == texts[LARGE]
    wait_until(lambda: text_of(other.url, "fast") == texts[LARGE], SEEN_S)
    assert admin(other, "DELETE", "/fast").status_code == 200
    wait_until(lambda: text_of(one.url, "fast") == texts["tiny"], SEEN_S)


def test_figures_are_by_model(mesh: MeshProcess, texts: dict[str, str]) -> None:
    [scheduler] = parts_of(mesh, "scheduler")
    tokens = {
        model: scheduler.total("vllm:iteration_tokens_total_sum", model_name=model)
        for model in texts
    }
    assert min(tokens.values()) > 0


def test_a_model_without_its_worker_is_503_and_the_other_goes_on(
    mesh: MeshProcess, texts: dict[str, str]
) -> None:
    worker_of(mesh, "tiny").kill()
    # A request that was there before would wait for the next worker.
    gateways = parts_of(mesh, "gateway")
    wait_until(lambda: not any("tiny" in listed(gateway) for gateway in gateways), SEEN_S)
    assert ask(mesh.base_url, "tiny").status_code == 503
    assert ask(mesh.base_url, "fast").status_code == 503
    assert text_of(mesh.base_url, LARGE) == texts[LARGE]
    assert text_of(mesh.base_url, "chat", user="whoever") == texts[LARGE]
    wait_until(lambda: ask(mesh.base_url, "tiny").status_code == 200, RECOVERY_S)
    assert text_of(mesh.base_url, "fast") == texts["tiny"]


def worker_of(mesh: MeshProcess, name: str) -> psutil.Process:
    served = f'["{name}"]'
    [worker] = [
        process
        for process in mesh.all_of("worker")
        if process.environ().get("PAGEMESH_SERVED_MODEL_NAME") == served
    ]
    return worker
