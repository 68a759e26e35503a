"""The command line's view of the settings schema: one flag per leaf, named as vLLM names it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

from pagemesh.shared.errors import SettingsError
from pagemesh.shared.settings_sources import (
    Loaded,
    SettingField,
    load_settings,
    nearest,
    setting_fields,
)

DAY_ONE_TITLE: Final = "the flags of the first day"
_SECTION_TITLES: Final = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "parallel": "devices",
    "gateway": "gateway",
    "mesh": "mesh",
    "log": "logs",
}


class Parser(argparse.ArgumentParser):
    """Raises SettingsError where argparse would print the usage and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_HelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help", key="argv")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def add_setting_flags(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """MODEL and a flag for every setting: those of the first day first, the others by section.
    `several` models may be given where that makes sense."""
    if several:
        help_text = "same as --model; several: same as --models"
        parser.add_argument("positional_models", nargs="*", metavar="MODEL", help=help_text)
    else:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    fields = setting_fields().values()
    first_day = parser.add_argument_group(DAY_ONE_TITLE)
    for field in fields:
        if field.day_one:
            _add_flag(first_day, field)
    for section, title in _SECTION_TITLES.items():
        group = parser.add_argument_group(title)
        for field in fields:
            if field.section == section and not field.day_one:
                _add_flag(group, field)
    parser.add_argument_group("other").add_argument(
        "--config", metavar="FILE", help="a YAML file of settings; flags and PAGEMESH_* win over it"
    )


def _add_flag(group: argparse._ArgumentGroup, field: SettingField) -> None:
    options: dict[str, Any] = {"dest": field.key, "help": _help(field)}
    if field.is_bool:
        options["action"] = argparse.BooleanOptionalAction
    elif field.choices is not None:
        options["metavar"] = "{" + ",".join(field.choices) + "}"
    else:
        options["metavar"] = field.key.rsplit("_", 1)[-1].upper()
    if field.is_list or field.is_mapping:
        options["nargs"] = "+"
    group.add_argument(field.flag, **options)


def _help(field: SettingField) -> str:
    text = field.help.replace("%", "%%")
    if (
        field.default is None
        or field.is_list
        or field.is_mapping
        or "default" in field.help
        or field.default == ""
    ):
        return text
    shown = ("on" if field.default else "off") if field.is_bool else field.default
    return f"{text} (default: {shown})"


def normal_argv(argv: Iterable[str]) -> list[str]:
    """`--max_num_seqs=8` as `--max-num-seqs=8`; values stay as they are."""
    return [
        re.sub(r"^--[\w-]+", lambda flag: flag.group().replace("_", "-"), argument)
        for argument in argv
    ]


def load_given(given: dict[str, Any]) -> Loaded:
    """The settings, from what a parser with `add_setting_flags` found and the environment."""
    config = given.pop("config", None)
    several = given.pop("positional_models", [])
    positional = several[0] if len(several) == 1 else given.pop("positional_model", None)
    if len(several) > 1:
        _take_several(given, several)
    if positional is not None:
        if given.get("model", positional) != positional:
            raise SettingsError(
                f"two models are given: {positional} and {given['model']}", key="model"
            )
        given["model"] = positional
    return load_settings(given, Path(config) if config else None, os.environ)


def _take_several(given: dict[str, Any], models: list[str]) -> None:
    for key in ("model", "models"):
        if key in given:
            raise SettingsError(
                f"models are given twice: {' '.join(models)}, and by --{key}", key=key
            )
    given["models"] = models


def refuse_unknown(extras: list[str], parser: argparse.ArgumentParser) -> None:
    """Raise SettingsError for what the parser did not understand, naming the nearest flag."""
    if not extras:
        return
    flags = [argument for argument in extras if argument.startswith("-")]
    if not flags:
        raise SettingsError(f"unexpected argument {extras[0]}", key="argv")
    name = flags[0].split("=")[0]
    near = nearest(name, _flags_of(parser))
    raise SettingsError(f"unknown flag {name}; the nearest is {near}", key=name)


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    actions = parser._actions
    flags = [flag for action in actions for flag in action.option_strings]
    return [flag for flag in flags if flag.startswith("--")]
