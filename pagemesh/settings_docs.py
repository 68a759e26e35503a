"""docs/settings.md, written from the schema (`make docs`)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import inspect

from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import SettingField, setting_fields

_INTRODUCTION = """\
# Settings

Every setting has one name, which is its flag (`--max-num-seqs`), its environment variable
(`PAGEMESH_MAX_NUM_SEQS`), its YAML key (`max_num_seqs`, at the top level or under its section) and
its keyword in `LLM(max_num_seqs=…)`. Flags win over variables, variables over the YAML file
(`--config FILE` or `PAGEMESH_CONFIG`), the file over the defaults. An unknown name is an error that
names the nearest one. `pagemesh config show` prints each value and where it came from.

A switch is turned on by its flag and off by the flag with `no-` (`--no-enable-prefix-caching`). A
list takes several values (`--api-key one two`), separated by commas in a variable. An empty
variable counts as unset. A mapping is `NAME=VALUE` words in flags and in a variable, or JSON.

This file is generated from the schema (`make docs`).
"""


def settings_markdown() -> str:
    sections = [_section(name) for name in Settings.__struct_fields__]
    return "\n".join([_INTRODUCTION, *sections])


def _section(name: str) -> str:
    fields = [field for field in setting_fields().values() if field.section == name]
    return f"## {name}\n\n" + "\n".join(_table(fields)) + "\n"


def _table(fields: Iterable[SettingField]) -> Iterable[str]:
    yield "| flag | values | default | |"
    yield "|---|---|---|---|"
    for field in fields:
        yield f"| `{field.flag}` | {_values(field)} | {_default(field)} | {field.help} |"


def _default(field: SettingField) -> str:
    if field.default is None or field.default in ("", [], {}):
        return ""
    if field.is_bool:
        return "on" if field.default else "off"
    shown = " ".join(field.default) if field.is_list else field.default
    return f"`{shown}`"


def _values(field: SettingField) -> str:
    if field.choices is not None:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    return _shape(field.shape)


def _shape(shape: inspect.Type) -> str:
    match shape:
        case inspect.BoolType():
            return "switch"
        case inspect.ListType():
            return "list"
        case inspect.DictType():
            return "mapping"
        case inspect.IntType():
            return f"whole number {_range(shape)}".rstrip()
        case inspect.FloatType():
            return f"number {_range(shape)}".rstrip()
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case inspect.UnionType(types=types):
            return " or ".join(_shape(one) for one in types if type(one) is not inspect.NoneType)
    return "text"


def _range(shape: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("≥", shape.ge), (">", shape.gt), ("≤", shape.le), ("<", shape.lt))
    return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


if __name__ == "__main__":
    print(settings_markdown(), end="")
