"""Settings from every source: precedence, typing, and errors that name the nearest key."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import GatewaySettings, Settings
from pagemesh.shared.settings_sources import (
    DEFAULT,
    SettingField,
    environ_of,
    load_settings,
    setting_fields,
)


def from_yaml(text: str, folder: Path) -> Settings:
    path = folder / "pagemesh.yaml"
    path.write_text(text)
    return load_settings({}, path, {}).settings


def error_of(**sources: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(
            sources.get("flags", {}), sources.get("yaml_path"), sources.get("environ", {})
        )
    return str(caught.value)


def test_without_sources_everything_is_default() -> None:
    loaded = load_settings({}, None, {"HOME": "/", "PATH": "/bin"})
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {DEFAULT}
    assert set(loaded.origins) == set(setting_fields())


def test_flags_win_over_variables_over_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 1\nmax_num_seqs: 1\nblock_size: 1\n")
    environ = {"PAGEMESH_PORT": "2", "PAGEMESH_MAX_NUM_SEQS": "2"}
    loaded = load_settings({"port": "3"}, path, environ)
    assert loaded.settings.gateway.port == 3
    assert loaded.settings.scheduler.max_num_seqs == 2
    assert loaded.settings.cache.block_size == 1
    assert loaded.origins["port"] == "--port"
    assert loaded.origins["max_num_seqs"] == "PAGEMESH_MAX_NUM_SEQS"
    assert loaded.origins["block_size"] == str(path)
    assert loaded.origins["host"] == DEFAULT


@pytest.mark.parametrize(
    "text",
    [
        "max_num_seqs: 7",
        "max-num-seqs: 7",
        "scheduler: {max_num_seqs: 7}",
        "scheduler:\n  max-num-seqs: 7",
        'max_num_seqs: "7"',
    ],
)
def test_yaml_takes_sections_or_flat_names_in_either_spelling(text: str, tmp_path: Path) -> None:
    assert from_yaml(text, tmp_path).scheduler.max_num_seqs == 7


def test_model_is_a_section_and_a_leaf(tmp_path: Path) -> None:
    assert from_yaml("model: some/hub-id", tmp_path).model.model == "some/hub-id"
    nested = from_yaml("model: {model: some/hub-id, dtype: float32}", tmp_path).model
    assert (nested.model, nested.dtype) == ("some/hub-id", "float32")


def test_an_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    assert from_yaml("# nothing yet\n", tmp_path) == Settings()


def test_the_yaml_file_may_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("port: 9")
    environ = {"PAGEMESH_CONFIG": str(tmp_path / "c.yaml")}
    assert load_settings({}, None, environ).settings.gateway.port == 9


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("max_num_seq: 7", "unknown setting max_num_seq in {path}; the nearest is max_num_seqs"),
        ("scheduler: {prot: 1}", "unknown setting prot in {path}, section scheduler"),
        ("schedular: {port: 1}", "the nearest is scheduler"),
        ("port: 1\ngateway: {port: 2}", "sets port twice"),
        ("- a list", "must hold settings"),
        ("a: b: c", "is not valid YAML: mapping values are not allowed here in line 1"),
        ("port: [1]", "port = [1] (from {path}) will not do: expected int"),
        ("enable_prefix_caching: maybe", "will not do"),
    ],
)
def test_a_bad_yaml_file_is_one_clear_error(text: str, fragment: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert fragment.format(path=path) in error_of(yaml_path=path)


def test_a_missing_yaml_file_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in error_of(yaml_path=tmp_path / "absent.yaml")


def test_an_unknown_variable_names_the_nearest_variable() -> None:
    message = error_of(environ={"PAGEMESH_MAX_SEQS": "1"})
    assert message.endswith("in the environment; the nearest is PAGEMESH_MAX_NUM_SEQS")


def test_an_unknown_keyword_names_the_nearest_key() -> None:
    with pytest.raises(SettingsError, match=r"max_modle_len in the keywords; .* max_model_len"):
        load_settings({"max_modle_len": 1}, None, {}, override_origin="keyword")


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("port", "http", "expected int"),
        ("port", "70000", "<= 65535"),
        ("max_num_seqs", "0", ">= 1"),
        ("gpu_memory_utilization", "1.5", "<= 1"),
        ("gpu_memory_utilization", "0", "> 0"),
        ("dtype", "int4", "choose one of"),
        ("max_model_len", "-1", ">= 1"),
        ("max_model_len", "autp", "give a number or auto"),
        ("enable_prefix_caching", "perhaps", "expected bool"),
        ("watermark", "1", "< 1"),
    ],
)
def test_a_value_outside_its_type_is_refused_from_every_source(
    key: str, text: str, reason: str
) -> None:
    for sources in ({"flags": {key: text}}, {"environ": {f"PAGEMESH_{key.upper()}": text}}):
        message = error_of(**sources)
        assert key in message
        assert reason in message


@pytest.mark.parametrize(
    "text", ["api_key: [hidden", "mesh_secret: *hidden", "x: 1\nkey: hidden: 1"]
)
def test_a_line_of_yaml_with_a_flaw_is_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    message = error_of(yaml_path=tmp_path / "c.yaml")
    assert "in line" in message
    assert "hidden" not in message


def test_a_bad_secret_is_not_repeated() -> None:
    assert "hidden" not in error_of(flags={"api_key": [["hidden"]]})


def test_an_empty_variable_counts_as_unset() -> None:
    environ = {"PAGEMESH_API_KEY": "", "PAGEMESH_PORT": ""}
    assert load_settings({}, None, environ).settings == Settings()


@pytest.mark.parametrize(
    ("text", "keys"),
    [("a", ["a"]), ("a, b", ["a", "b"]), ('["a,b", "c"]', ["a,b", "c"]), ("[a", ["[a"])],
)
def test_lists_in_variables(text: str, keys: list[str]) -> None:
    loaded = load_settings({}, None, {"PAGEMESH_API_KEY": text})
    assert loaded.settings.gateway.api_key == keys


def test_keywords_are_typed_like_flags() -> None:
    typed = load_settings(
        {"max_model_len": 128, "enable_prefix_caching": False, "served_model_name": "one"},
        None,
        {},
        override_origin="keyword",
    )
    assert typed.settings.model.max_model_len == 128
    assert typed.settings.cache.enable_prefix_caching is False
    assert typed.settings.model.served_model_name == ["one"]
    assert typed.origins["max_model_len"] == "keyword"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"ssl_certfile": "a.pem"}, "ssl_certfile"),
        ({"mesh_certfile": "a.pem", "mesh_keyfile": "b.pem"}, "mesh_certfile"),
        ({"mesh_cafile": "ca.pem"}, "mesh_certfile"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size"),
        ({"host": "0.0.0.0"}, "host"),
        ({"max_stored_bytes": "4096"}, "max_response_bytes"),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": "64",
                "max_model_len": "128",
            },
            "enable_chunked_prefill",
        ),
        ({"allowed_origins": ["https://a.test/page"]}, "allowed_origins"),
        ({"allowed_origins": ['["*"]']}, "allowed_origins"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, None, {})
    assert caught.value.key == key
    assert isinstance(caught.value, StartupError)


def test_several_gateways_need_a_system_that_shares_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"gateways": "2"}, None, {}).settings.mesh.gateways == 2
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    assert "gateways must be 1: this system lacks SO_REUSEPORT" in error_of(flags={"gateways": "2"})


def test_pages_are_named_by_their_origins() -> None:
    origins = ["*", "https://a.test", "http://localhost:3000/", "app://x"]
    loaded = load_settings({"allowed_origins": origins}, None, {})
    assert loaded.settings.gateway.allowed_origins == origins


@pytest.mark.parametrize("guard", [{"api_key": ["k"]}, {"allow_unauthenticated": True}])
def test_another_host_needs_a_key_or_a_word(guard: dict[str, Any]) -> None:
    loaded = load_settings({"host": "0.0.0.0", **guard}, None, {})
    assert loaded.settings.gateway.host == "0.0.0.0"


def test_ten_flags_make_the_first_day() -> None:
    assert len([field for field in setting_fields().values() if field.day_one]) == 10


def test_every_setting_is_described() -> None:
    for field in setting_fields().values():
        assert field.help
        assert field.help[0].isupper() or field.help.split()[0] in ("dummy:", "auto:", "redis://")


# -- passing settings on to child processes --------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1)


def field_values(field: SettingField) -> st.SearchStrategy[Any]:
    match field.shape:
        case inspect.BoolType():
            return st.booleans()
        case inspect.ListType():
            return st.lists(TEXT, max_size=3)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.StrType():
            return TEXT
        case inspect.UnionType(types=types) if any(isinstance(t, inspect.StrType) for t in types):
            return st.none() | TEXT
    return st.just(field.default)


@given(st.data())
def test_children_load_the_settings_of_their_parent(data: st.DataObject) -> None:
    settings = Settings(
        gateway=GatewaySettings(max_body_bytes=4096, request_timeout_s=0.5, seed=-5)
    )
    for field in setting_fields().values():
        if field.key in ("allowed_origins", "host", "models"):
            continue
        if field.key.endswith(("certfile", "keyfile", "cafile")):
            continue
        section = getattr(settings, field.section)
        if getattr(section, field.key) == field.default:
            value = data.draw(field_values(field), label=field.key)
            section = replace(section, **{field.key: value})
            settings = replace(settings, **{field.section: section})
    assert load_settings({}, None, environ_of(settings)).settings == settings


def test_children_get_lists_of_models_and_routes() -> None:
    given = {"models": ["a", "b=x,y z"], "routes": {"a b": {"c:1": 2.5}, "d": "e:1,f"}}
    settings = load_settings(given, None, {}).settings
    assert settings.model.models == given["models"]
    assert load_settings({}, None, environ_of(settings)).settings == settings


def test_routes_in_yaml_are_a_mapping(tmp_path: Path) -> None:
    text = "routes: {fast: model-a, chat: {model-a: 0.9, model-b: 0.1}}"
    routes = from_yaml(text, tmp_path).gateway.routes
    assert routes == {"fast": "model-a", "chat": {"model-a": 0.9, "model-b": 0.1}}
