"""What the gateway process loads: nothing of the models, and no compiled Rust."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "orjson", "jsonschema")

# Rust binaries hold the paths of the standard library they were built from.
PROBE = f"""
import sys
from pathlib import Path
import pagemesh.gateway.service
import pagemesh.shared.service
loaded = sorted(name for name in {FORBIDDEN!r} if name in sys.modules)
assert not loaded, loaded
files = {{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}}
extensions = [Path(file) for file in files if ".so" in file and "site-packages" in file]
assert extensions, "no extension module seen: the probe looks in the wrong place"
rust = [str(file) for file in extensions if b"/rustc/" in file.read_bytes()]
assert not rust, rust
import {{rust_module}}
files = {{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}}
assert any(b"/rustc/" in Path(f).read_bytes() for f in files if ".so" in f), "the probe is blind"
"""


def test_the_gateway_loads_no_model_library_and_no_rust() -> None:
    probe = PROBE.replace("{rust_module}", "tokenizers")
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
