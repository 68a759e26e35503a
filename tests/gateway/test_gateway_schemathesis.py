"""Schemathesis against /openapi.json: boundary and random requests, good and bad, by the document.

No 5xx, only statuses and content types that are documented, errors in their shape, no bad body
taken for a good one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from gateway_fakes import fake_tokenizer, running_gateway, say_hello, settings_for

# Good bodies may be refused: a schema knows neither the vocabulary nor what excludes what. Times
# may be too short (504). What has no key may not ask which methods an open route has. A pause would
# hold all others. The fields of completions, and of render, are mostly those of chats.
CONFIG: Final = """
seed = 1
continue-on-failure = true
warnings = false

[auth.openapi.key]
bearer = "client"

[auth.openapi.admin]
bearer = "admin"

[generation]
max-examples = 4
no-shrink = true

[phases]
examples.enabled = false
stateful.enabled = false

[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
positive_data_acceptance.enabled = false

[[operations]]
include-path-regex = "/pause$"
enabled = false

[[operations]]
include-path-regex = "^/v1/completions$|/render$"
phases.coverage.enabled = false

[[operations]]
include-path-regex = "^/(health|ready|metrics|docs|openapi.json)$"
checks.unsupported_method.enabled = false
"""


async def test_what_is_asked_by_the_document_is_answered_by_it(
    redis_url: str, mesh_name: str, tmp_path: Path
) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    keys = {"api_key": ["client"], "admin_key": ["admin"]}
    settings = settings_for(redis_url, mesh_name, **keys, files_dir=str(tmp_path / "files"))
    async with fake_tokenizer(settings, script=say_hello), running_gateway(settings) as gateway:
        await gateway.until_ready()
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        running = await asyncio.create_subprocess_exec(
            *command,
            f"{gateway.url}/openapi.json",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await running.communicate()
    assert running.returncode == 0, output.decode()
