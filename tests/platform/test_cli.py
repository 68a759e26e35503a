"""The command line: help, errors in one line, and the settings it arrives at."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from pagemesh import cli
from pagemesh.flags import DAY_ONE_TITLE
from pagemesh.shared.settings_sources import setting_fields

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PAGEMESH_")]:
        monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, tuple[str, str]]:
    """The rows of `config show`: key to (value, origin)."""
    assert cli.main(["config", "show", *argv]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] == " "]
    return {row[0]: (" ".join(row[1:-1]), row[-1]) for row in rows}


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command line that cannot work."""
    assert cli.main(argv) == cli.EXIT_STARTUP
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pagemesh: error: ")
    return line.removeprefix("pagemesh: error: ")


def test_version_as_a_process() -> None:
    command = [sys.executable, "-m", "pagemesh.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"pagemesh {version('pagemesh')}\n"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_alone_asks_for_a_registry(service: str) -> None:
    command = [sys.executable, "-m", "pagemesh.cli", service]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == cli.EXIT_STARTUP
    assert done.stderr.splitlines()[-1].startswith("pagemesh: error: a service alone needs")


def test_help_shows_the_flags_of_the_first_day_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    _, rest = capsys.readouterr().out.split(f"{DAY_ONE_TITLE}:\n")
    first_day = rest.split("\n\n")[0]
    flags = [line.split()[0].strip(",") for line in first_day.splitlines() if line[:4] == "  --"]
    assert len(flags) == 10
    assert flags == [field.flag for field in setting_fields().values() if field.day_one]


def test_every_setting_has_a_flag_on_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", *SERVICES, "prepare"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert all(f"{field.flag}" in text for field in setting_fields().values())


def test_the_positional_model_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "some/model")["model"] == ('"some/model"', "--model")
    assert shown(capsys, "--model", "some/model")["model"] == ('"some/model"', "--model")


def test_several_positional_models_are_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "a", "x=./b")["models"] == ('["a","x=./b"]', "--models")


def test_routes_may_be_words_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = shown(capsys, "m", "--routes", "fast=a", "chat=a:0.9,b:0.1")
    assert rows["routes"] == ('{"fast":"a","chat":"a:0.9,b:0.1"}', "--routes")
    for text in ("fast=a chat=b", '{"fast": "a", "chat": "b"}'):
        monkeypatch.setenv("PAGEMESH_ROUTES", text)
        assert shown(capsys)["routes"][0] == '{"fast":"a","chat":"b"}'


def test_two_different_models_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a and b" in error_of(capsys, "config", "show", "a", "--model", "b")


def test_booleans_are_pairs_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--no-enable-prefix-caching")["enable_prefix_caching"][0] == "false"
    assert shown(capsys, "--enable-prefix-caching")["enable_prefix_caching"][0] == "true"
    assert shown(capsys, "--trust-remote-code")["trust_remote_code"][0] == "true"
    assert shown(capsys, "--no-trust-remote-code")["trust_remote_code"][0] == "false"


def test_lists_take_several_values(capsys: pytest.CaptureFixture[str]) -> None:
    names = shown(capsys, "m", "--served-model-name", "a", "b")["served_model_name"][0]
    assert names == '["a","b"]'


def test_flags_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--max_num_seqs=9")["max_num_seqs"] == ("9", "--max-num-seqs")


def test_config_show_names_every_origin(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text("block_size: 32")
    monkeypatch.setenv("PAGEMESH_MAX_WAITING", "8")
    rows = shown(capsys, "--config", str(path), "--port", "1")
    assert rows["block_size"] == ("32", str(path))
    assert rows["max_waiting"] == ("8", "PAGEMESH_MAX_WAITING")
    assert rows["port"] == ("1", "--port")
    assert rows["host"] == ('"127.0.0.1"', "default")
    assert set(rows) == set(setting_fields())


def test_config_show_masks_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--api-key", "hidden", "--mesh-secret", "hidden", "--redis-url", "redis://:hidden@h"]
    assert cli.main(["config", "show", *argv]) == 0
    assert "hidden" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["serve", "--max-num-seq", "1"],
            "unknown flag --max-num-seq; the nearest is --max-num-seqs",
        ),
        (["serve", "--kv-cache-memory-bytes=1"], "the nearest is --kv-cache-memory"),
        (["worker", "--no-enable-prefix-cache"], "the nearest is --no-enable-prefix-caching"),
        (["serve", "a", "--port", "1", "b"], "unexpected argument b"),
        (["serve", "a", "b", "--model", "c"], "models are given twice: a b, and by --model"),
        (["worker", "a", "b"], "name one of them with --model"),
        (["serve", "a", "b", "--served-model-name", "x"], "write NAME=MODEL in their list"),
        (["serve", "m", "--routes", "a=b", "b=a"], "leads back to itself (a → b → a)"),
        (["serve", "m", "--routes", "a:b"], "expected each name once, as NAME=VALUE"),
        (["serve", "--port"], "argument --port: expected one argument; see pagemesh serve --help"),
        (["serve", "--port", "x"], "port = 'x' (from --port) will not do: expected int"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["gateway", "--host", "0.0.0.0"], "set an --api-key"),
        (["serve", "--service-port", "7000"], "cannot give --service-port 7000 to each"),
        (["worker", "--service-host", "0.0.0.0"], "give every service of the mesh the same --mesh"),
        (["serv"], "invalid choice: 'serv'"),
    ],
)
def test_what_cannot_work_is_one_line(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in error_of(capsys, *argv)
