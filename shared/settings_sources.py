"""Where settings come from: flags over PAGEMESH_* variables over the YAML file over defaults.

Every source speaks the one schema of `shared/settings.py`. An unknown key anywhere is an error that
names the nearest one; every value is typed by the schema.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec
import yaml
from msgspec import inspect

from pagemesh.shared.errors import SettingsError
from pagemesh.shared.model_list import check_models
from pagemesh.shared.routes import BadRoute, read_routes
from pagemesh.shared.settings import Settings, check_settings

ENV_PREFIX: Final = "PAGEMESH_"
CONFIG_VARIABLE: Final = "PAGEMESH_CONFIG"
DEFAULT: Final = "default"


class SettingField(NamedTuple):
    """One leaf of the schema, as every source and the documentation see it."""

    section: str
    key: str
    type: Any
    default: Any
    help: str
    day_one: bool
    secret: bool
    shape: inspect.Type

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def is_bool(self) -> bool:
        return isinstance(self.shape, inspect.BoolType)

    @property
    def is_list(self) -> bool:
        return isinstance(self.shape, inspect.ListType)

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.shape, inspect.DictType)

    @property
    def choices(self) -> list[str] | None:
        if isinstance(self.shape, inspect.LiteralType):
            return [str(value) for value in self.shape.values]
        return None

    @property
    def words(self) -> list[str]:
        """What may stand in place of a number."""
        if not isinstance(self.shape, inspect.UnionType):
            return []
        literals = [one for one in self.shape.types if isinstance(one, inspect.LiteralType)]
        return [str(value) for literal in literals for value in literal.values]


class Given(NamedTuple):
    """A value before typing, and where it was found (for messages and `config show`)."""

    value: Any
    origin: str


class Loaded(NamedTuple):
    settings: Settings
    origins: dict[str, str]


@cache
def setting_fields() -> Mapping[str, SettingField]:
    """Every leaf by key, in the order of the schema."""
    fields: dict[str, SettingField] = {}
    for section in msgspec.structs.fields(Settings):
        for leaf in _section_fields(section.name, section.type):
            assert leaf.key not in fields, f"two settings are called {leaf.key}"
            fields[leaf.key] = leaf
    return fields


def _section_fields(section: str, struct: type[msgspec.Struct]) -> Iterable[SettingField]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    hints = get_type_hints(struct, include_extras=True)
    defaults = struct()
    for field in info.fields:
        assert isinstance(field.type, inspect.Metadata), f"{field.name} has no description"
        extra = field.type.extra or {}
        yield SettingField(
            section=section,
            key=field.name,
            type=hints[field.name],
            default=getattr(defaults, field.name),
            help=(field.type.extra_json_schema or {})["description"],
            day_one=extra["day_one"],
            secret=extra["secret"],
            shape=field.type.type,
        )


def load_settings(
    overrides: Mapping[str, Any],
    yaml_path: Path | None,
    environ: Mapping[str, str],
    *,
    override_origin: str = "flag",
) -> Loaded:
    """The settings of one process. `overrides` are flags (text) or keywords (typed), by leaf key.

    Raises SettingsError for an unknown key or a value the schema does not allow.
    """
    if yaml_path is None and environ.get(CONFIG_VARIABLE):
        yaml_path = Path(environ[CONFIG_VARIABLE])
    given: dict[str, Given] = {}
    if yaml_path is not None:
        given.update(_from_yaml(yaml_path))
    given.update(_from_environ(environ))
    given.update(_from_overrides(overrides, override_origin))
    settings = _build(given)
    _check(settings)
    origins = {key: given[key].origin if key in given else DEFAULT for key in setting_fields()}
    return Loaded(settings, origins)


def _check(settings: Settings) -> None:
    check_settings(settings)
    check_models(settings.model)
    try:
        read_routes(settings.gateway.routes)
    except BadRoute as error:
        raise SettingsError(f"routes: {error}", key="routes") from error


def environ_of(settings: Settings) -> dict[str, str]:
    """The variables from which another process loads the same settings. Holds the secrets."""
    variables: dict[str, str] = {}
    for field in setting_fields().values():
        value = getattr(getattr(settings, field.section), field.key)
        if value != field.default:
            # JSON spells lists, numbers and booleans as the schema reads them back.
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            variables[field.variable] = text
    return variables


def is_ours(variable: str) -> bool:
    """Whether an environment variable belongs to the settings."""
    return variable.startswith(ENV_PREFIX)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def _from_yaml(path: Path) -> dict[str, Given]:
    try:
        document = yaml.safe_load(path.expanduser().read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", key="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {_flaw(error)}", key="config") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"{path} must hold settings as `key: value` lines", key="config")
    given: dict[str, Given] = {}
    for key, value in _leaves(document, path):
        if key in given:
            raise SettingsError(f"{path} sets {key} twice", key=key)
        given[key] = Given(value, str(path))
    return given


def _flaw(error: Exception) -> str:
    """What is wrong and where, without what stands there: it may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    problem = re.sub(r" *'.*'", "", error.problem or "a flaw")
    return f"{problem} in line {error.problem_mark.line + 1}"


def _leaves(document: Mapping[Any, Any], path: Path) -> Iterable[tuple[str, Any]]:
    """The leaf keys of a document, under their sections or at the top level.

    `model` is both a section and a leaf: a mapping is the section.
    """
    fields = setting_fields()
    sections = Settings.__struct_fields__
    for raw, value in document.items():
        key = _normal(raw)
        if isinstance(value, dict) and key in sections:
            known = [field.key for field in fields.values() if field.section == key]
            for inner, leaf in value.items():
                yield _known(_normal(inner), known, f"{path}, section {key}", str(inner)), leaf
        elif key in fields:
            yield key, value
        else:
            _unknown(str(raw), nearest(key, [*fields, *sections]), str(path), key)


def _from_environ(environ: Mapping[str, str]) -> dict[str, Given]:
    """An empty variable counts as unset, as compose files write `${NAME:-}`."""
    variables = {field.variable: field for field in setting_fields().values()}
    given: dict[str, Given] = {}
    for name, text in environ.items():
        if not is_ours(name) or name == CONFIG_VARIABLE or not text:
            continue
        if name not in variables:
            _unknown(name, nearest(name, [*variables, CONFIG_VARIABLE]), "the environment", name)
        field = variables[name]
        given[field.key] = Given(_split(text) if field.is_list else text, name)
    return given


def _split(text: str) -> Any:
    """A list in a variable: comma-separated, or JSON when the items hold commas."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            pass
    return [part.strip() for part in text.split(",") if part.strip()]


def _from_overrides(overrides: Mapping[str, Any], origin: str) -> dict[str, Given]:
    fields = setting_fields()
    given: dict[str, Given] = {}
    for raw, value in overrides.items():
        key = _known(_normal(raw), fields, f"the {origin}s", raw)
        given[key] = Given(value, fields[key].flag if origin == "flag" else origin)
    return given


def _build(given: Mapping[str, Given]) -> Settings:
    sections: dict[str, Any] = {}
    for section in msgspec.structs.fields(Settings):
        leaves = {
            key: _typed(field, given[key])
            for key, field in setting_fields().items()
            if field.section == section.name and key in given
        }
        sections[section.name] = section.type(**leaves)
    return Settings(**sections)


def _typed(field: SettingField, given: Given) -> Any:
    value = given.value
    if field.is_list and isinstance(value, str):
        value = [value]
    try:
        if field.is_mapping and not isinstance(value, dict):
            value = _mapping(value)
        # Text sources hold "8000" and "true"; lax mode reads them as what the schema wants.
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.MsgspecError as error:
        shown = "(a secret)" if field.secret else repr(given.value)
        raise SettingsError(
            f"{field.key} = {shown} (from {given.origin}) will not do: {_wanted(field, error)}",
            key=field.key,
        ) from error


def _mapping(value: str | list[str]) -> Any:
    """A mapping in text: JSON, or words `NAME=VALUE`. Raises msgspec.ValidationError."""
    text = value if isinstance(value, str) else " ".join(value)
    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text, type=dict[str, Any])
    pairs = [word.partition("=") for word in text.split()]
    mapping = {name: rest for name, _, rest in pairs if name and rest}
    if len(mapping) < len(pairs):
        raise msgspec.ValidationError("expected each name once, as NAME=VALUE")
    return mapping


def _wanted(field: SettingField, error: Exception) -> str:
    if field.choices is not None:
        return "choose one of " + ", ".join(field.choices)
    if field.words and "enum" in str(error):
        return "give a number or " + ", ".join(field.words)
    return str(error).replace("Expected", "expected").replace("`", "").replace("null", "nothing")


def _normal(key: object) -> str:
    return str(key).replace("-", "_")


def _known(key: str, known: Iterable[str], where: str, shown: str) -> str:
    known = list(known)
    if key not in known:
        _unknown(shown, nearest(key, known), where, key)
    return key


def _unknown(shown: str, near: str, where: str, key: str) -> None:
    raise SettingsError(f"unknown setting {shown} in {where}; the nearest is {near}", key=key)
