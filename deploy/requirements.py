"""Write what each extra of pyproject.toml requires, and `base`, as lists of their own.

An image whose packages come from such a list keeps their layer when only the code has changed.
Usage: python requirements.py FOLDER
"""

import sys
import tomllib
from pathlib import Path

SELF = "pagemesh["


def expanded(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """The requirements of `extra`, with those of the extras that it names."""
    lines: list[str] = []
    for line in extras[extra]:
        names = line.removeprefix(SELF).rstrip("]").split(",") if line.startswith(SELF) else []
        lines += [more for name in names for more in expanded(name, extras)] or [line]
    return lines


def main(folder: Path) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = {**project["optional-dependencies"], "base": project["dependencies"]}
    folder.mkdir()
    for extra in extras:
        (folder / f"{extra}.txt").write_text("\n".join([*expanded(extra, extras), ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
