"""One real service with a probe: python -m parts.traced_service SERVICE."""

from __future__ import annotations

import sys

from pagemesh.cli import main
from parts.probe import installed_probe

if __name__ == "__main__":
    with installed_probe(sys.argv[1]):
        code = main(sys.argv[1:])
    sys.exit(code)
