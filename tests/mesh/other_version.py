"""`pagemesh` as a version with the wire protocol of the variable TEST_PROTOCOL would run it."""

from __future__ import annotations

import os
import sys

from pagemesh.shared import wire

# Before anything else reads it.
wire.PROTOCOL = int(os.environ["TEST_PROTOCOL"])  # type: ignore[misc]

from pagemesh.cli import main  # noqa: E402

sys.exit(main())
