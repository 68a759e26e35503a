"""The command line of scripts that run a model shape: their own options beside all settings."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pagemesh.flags import Parser, add_setting_flags, load_given, normal_argv
from pagemesh.shared.settings import Settings
from parts.model_shapes import SHAPES, model_folder

AddOptions = Callable[[Any], None]

_FOLDERS: Final = Path(tempfile.gettempdir()) / "pagemesh-shapes"
_MAX_MODEL_LEN: Final = 8448


def parse_shape_args(prog: str, doc: str, add_options: AddOptions) -> tuple[Namespace, Settings]:
    """What `add_options` adds to an argument group (each with a default), and the settings. MODEL
    is a shape by name or whatever `pagemesh serve` takes. Of a shape, weights are random, and
    requests have up to 8448 tokens unless a flag says otherwise.

    Raises SettingsError.
    """
    parser = Parser(prog=prog, description=doc.partition("\n")[0])
    group = parser.add_argument_group("measurement")
    add_options(group)
    names = [action.dest for action in group._group_actions]
    add_setting_flags(parser)
    given = vars(parser.parse_args(normal_argv(sys.argv[1:])))
    own = Namespace(**{name: given.pop(name) for name in names})
    model = given.pop("positional_model", given.get("model"))
    if model in SHAPES:
        given = {"load_format": "dummy", "max_model_len": _MAX_MODEL_LEN, **given}
        given["model"] = str(model_folder(model, _FOLDERS))
    elif model is not None:
        given["model"] = model
    return own, load_given(given).settings
