"""Log lines as a process writes them: each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PROGRAM = """
import logging, sys, warnings, structlog
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.settings import LogSettings

configure_logging("worker", LogSettings(log_level=sys.argv[1], log_format=sys.argv[2]))
log = structlog.get_logger("pagemesh.made_up")
log.debug("small_talk")
log.info("step_done", tokens=3)
with structlog.contextvars.bound_contextvars(request_id="req-1"):
    log.warning("preempted", blocks=2)
    logging.getLogger("aiohttp.server").error("from %s", "the library")
try:
    raise ValueError("a fault")
except ValueError:
    log.exception("failed")
logging.getLogger("asyncio").info("narration")
logging.getLogger("numba.core.ssa").debug("narration")
log.info("divided", weights_bytes=5, table=[("weights", "5 bytes"), ("KV pool", "2 MiB: 3 blocks")])
"""


def stderr_of(level: str, log_format: str, **environ: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, level, log_format],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    ).stderr


def lines_of(level: str, log_format: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr_of(level, log_format).splitlines()]


def test_without_a_terminal_every_line_is_json() -> None:
    lines = lines_of("info", "auto")
    assert [line["event"] for line in lines] == [
        "step_done",
        "preempted",
        "from the library",
        "failed",
        "divided",
    ]
    assert all(line["service"] == "worker" and line["timestamp"] for line in lines)
    assert lines[0] == {**lines[0], "level": "info", "tokens": 3, "logger": "pagemesh.made_up"}
    assert "ValueError: a fault" in lines[3]["exception"]


def test_bound_request_ids_reach_the_libraries_lines_too() -> None:
    ids = [line.get("request_id") for line in lines_of("info", "json")]
    assert ids == [None, "req-1", "req-1", None, None]


def test_lines_of_every_level_are_made_alike() -> None:
    """Those of `info` take a way of their own."""
    told = """
for tell in (log.info, log.warning, log.bind(own=1).info, log.bind(own=1).warning):
    with structlog.contextvars.bound_contextvars(service="other", own=2):
        tell("told %s of %d", "two", 3, text="x")
        tell("told", service="its own", table=[("a", "b")])
"""
    program = PROGRAM.partition("log.debug")[0] + told
    command = [sys.executable, "-c", program, "debug", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    apart = {"level": "", "timestamp": ""}
    for info, warning in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert lines[info] | apart == lines[warning] | apart
        assert lines[info].keys() == lines[warning].keys()
    assert lines[0]["event"] == "told two of 3"
    assert [line["service"] for line in lines[:2]] == ["other", "its own"]


def test_the_level_hides_what_is_less_severe() -> None:
    assert "step_done" not in [line["event"] for line in lines_of("warning", "json")]
    told = [line["event"] for line in lines_of("debug", "json")]
    assert "small_talk" in told
    assert "narration" not in told


def test_people_get_plain_lines() -> None:
    text = stderr_of("info", "human")
    assert "step_done" in text
    assert "tokens=3" in text
    assert "ValueError: a fault" in text
    assert "\x1b[" not in text
    assert "{" not in text.splitlines()[0]


def test_colours_can_be_asked_for_and_refused() -> None:
    assert "\x1b[" in stderr_of("info", "human", FORCE_COLOR="1")
    assert "\x1b[" not in stderr_of("info", "human", FORCE_COLOR="1", NO_COLOR="1")


def test_a_table_is_for_people_and_its_figures_for_machines() -> None:
    (line,) = [line for line in lines_of("info", "json") if line["event"] == "divided"]
    assert line["weights_bytes"] == 5
    assert "table" not in line
    shown = stderr_of("info", "human", NO_COLOR="1").splitlines()[-3:]
    assert shown[0].rstrip().endswith("divided")
    assert shown[1:] == ["  weights  5 bytes", "  KV pool  2 MiB: 3 blocks"]


def test_half_a_surrogate_pair_is_still_a_line() -> None:
    told = 'log.warning("told", text=chr(0xD800), thing=object)\n'
    program = PROGRAM.partition("log.debug")[0] + told
    ran = subprocess.run(
        [sys.executable, "-c", program, "info", "json"], capture_output=True, text=True, check=True
    )
    line = json.loads(ran.stderr)
    assert (line["text"], line["thing"]) == (chr(0xD800), repr(object))
