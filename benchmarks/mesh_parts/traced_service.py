"""One real service with a probe: python -m mesh_parts.traced_service SERVICE."""

from __future__ import annotations

import sys

from mesh_parts.probe import installed_probe
from pagemesh.cli import main

if __name__ == "__main__":
    with installed_probe(sys.argv[1]):
        code = main(sys.argv[1:])
    sys.exit(code)
