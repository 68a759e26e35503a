"""Hub ids, against a small local server that speaks the Hub's API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prepare_helpers import Options, RunPython

from pagemesh.prepare import prepare
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import load_prepared

REPO = "pagemesh-tests/tiny-llama"
COMMIT = "a" * 40
TAG_COMMIT = "b" * 40


@dataclass
class FakeHub:
    """Serves `files` as REPO. `refs` maps branches and tags to commits; `token` makes it gated."""

    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": TAG_COMMIT})
    token: str | None = None
    fetched: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of GET `path`."""
        path = path.split("?")[0]
        if self.token and authorization != f"Bearer {self.token}":
            return 403, {"X-Error-Code": "GatedRepo"}, b"gated"
        if info := re.fullmatch(f"/api/models/{REPO}/revision/(.+)", path):
            return self._info(info[1])
        if re.fullmatch(f"/api/models/{REPO}/tree/.+", path):
            return _json([self._entry(name) for name in self.files])
        if file := re.fullmatch(f"/{REPO}/resolve/([^/]+)/(.+)", path):
            return self._file(file[1], file[2])
        return 404, {"X-Error-Code": "RepoNotFound"}, b"no such repository"

    def _info(self, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self.refs.get(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"no such revision"
        siblings = [{"rfilename": name} for name in self.files]
        return _json({"id": REPO, "sha": commit, "siblings": siblings})

    def _entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}

    def _file(self, commit: str, name: str) -> tuple[int, dict[str, str], bytes]:
        data = self.files[name]
        self.fetched.append(name)
        return 200, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": commit}, data


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """The test's output is no access log."""

    return Handler


@pytest.fixture
def hub(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in tiny_source.iterdir()}
    extra = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx", "README.md": b"text"}
    hub = FakeHub({**files, **extra})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    # The environment is read when huggingface_hub is imported; other tests may have done that.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_model_is_fetched_and_prepared(hub: FakeHub, options: Options) -> None:
    folder = prepare(options(REPO))
    prepared = load_prepared(folder)
    assert (prepared.name, prepared.source) == (REPO, f"{REPO}@{COMMIT}")
    assert prepared.weights == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    wanted = set(hub.files) - {"pytorch_model.bin", "onnx/model.onnx", "README.md"}
    assert set(hub.fetched) == wanted


def test_second_call_fetches_nothing(hub: FakeHub, options: Options) -> None:
    folder = prepare(options(REPO))
    hub.fetched.clear()
    assert prepare(options(REPO)) == folder
    assert hub.fetched == []


def test_moved_branch_is_prepared_again(hub: FakeHub, options: Options) -> None:
    prepare(options(REPO))
    hub.refs["main"] = "c" * 40
    assert load_prepared(prepare(options(REPO))).source == f"{REPO}@{'c' * 40}"


def test_revision_is_its_own_model(hub: FakeHub, options: Options) -> None:
    tagged = prepare(options(REPO, revision="v1"))
    assert load_prepared(tagged).source == f"{REPO}@{TAG_COMMIT}"
    assert tagged != prepare(options(REPO))
    with pytest.raises(StartupError, match="no revision 'v2'"):
        prepare(options(REPO, revision="v2"))


def test_fetched_model_outlives_the_network(
    hub: FakeHub, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(options(REPO))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert prepare(options(REPO)) == folder


@pytest.mark.usefixtures("hub")
def test_unreachable_hub_is_a_sentence(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StartupError, match=r"the Hub cannot be reached and .* not on this machine"):
        prepare(options(REPO))


@pytest.mark.usefixtures("hub")
def test_missing_model_is_a_sentence(options: Options) -> None:
    with pytest.raises(StartupError, match="the Hub knows no model nobody/nothing"):
        prepare(options("nobody/nothing"))


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_gated_model_needs_the_token(
    hub: FakeHub, options: Options, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    hub.token = "hf_right"
    with pytest.raises(StartupError, match=r"is gated: .* set HF_TOKEN"):
        prepare(options(REPO))
    # As compose passes on what is not set.
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv(variable, "hf_right")
    assert load_prepared(prepare(options(REPO))).name == REPO


def test_pickle_only_model_is_refused(hub: FakeHub, options: Options) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(StartupError, match=f"{REPO} has no safetensors weights"):
        prepare(options(REPO))
    assert "pytorch_model.bin" not in hub.fetched


def test_unsupported_model_is_refused_before_its_weights(hub: FakeHub, options: Options) -> None:
    hub.files["config.json"] = b'{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'
    with pytest.raises(StartupError, match="MambaForCausalLM is not supported"):
        prepare(options(REPO))
    assert "model.safetensors" not in hub.fetched


def test_dummy_fetches_no_weights(hub: FakeHub, options: Options) -> None:
    assert load_prepared(prepare(options(REPO, load_format="dummy"))).weights == []
    assert "model.safetensors" not in hub.fetched


def test_tokenizer_of_a_hub_model(hub: FakeHub, options: Options, source: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert (prepare(options(source, tokenizer=REPO)) / "tokenizer.json").is_file()
    assert "model.safetensors" not in hub.fetched


def test_environment_alone_points_a_process_at_the_hub(
    hub: FakeHub, options: Options, run_python: RunPython, tmp_path: Path
) -> None:
    settings = options(REPO)
    hub.token = "hf_right"
    done = run_python(
        "from pagemesh.prepare import prepare\n"
        "from pagemesh.shared.settings import ModelSettings\n"
        f"print(prepare(ModelSettings(model={REPO!r}, cache_dir={settings.cache_dir!r})))\n",
        HF_ENDPOINT=hub.url,
        HF_TOKEN="hf_right",
        HF_HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 0, done.stderr
    assert load_prepared(Path(done.stdout.strip().splitlines()[-1])).name == REPO
