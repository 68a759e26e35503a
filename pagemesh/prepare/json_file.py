"""Reading the JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagemesh.shared.errors import StartupError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises StartupError when the file is missing or broken."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StartupError(
            f"{path} is missing: {path.parent} is no complete model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
