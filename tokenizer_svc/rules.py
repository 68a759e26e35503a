"""Checks of what answers must look like, before anything is scheduled."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Lock
from typing import Final

import msgspec

from pagemesh.shared.errors import PagemeshError, RequestError
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.structured_outputs import StructuredOutputsParams

MAX_REMEMBERED: Final = 1024
"""Verdicts; the oldest are forgotten first, and found out again."""


class RuleProcessEnded(PagemeshError):
    """The process that tries rules has ended. The message says how; its last words are in the
    log."""


class Rules:
    """Of one model. Owner of the process that tries them (see rule_process), which starts with the
    first one, is started again if it ended, and leaves with its owner. Threads may share it: they
    take turns."""

    def __init__(self, folder: Path, prepared: PreparedModel) -> None:
        ends = map(str, prepared.eos_token_ids)
        program = (sys.executable, "-m", "pagemesh.tokenizer_svc.rule_process")
        self._command = (*program, str(folder), str(prepared.vocab_tokens), *ends)
        self._lock = Lock()
        self._process: Popen[bytes] | None = None
        self._verdicts: dict[bytes, str | None] = {}
        """By rule, in the order of their first use: why it cannot be followed, None if it can."""

    def check(self, rule: StructuredOutputsParams) -> None:
        """Raises RequestError (400) for a rule that no answer could be made to follow, or that is
        too much work."""
        fault = self._verdict(msgspec.json.encode(rule))
        if fault is not None:
            raise RequestError(
                f"{rule.given_as} cannot be followed: {fault}",
                code="invalid_value",
                param=rule.given_as,
            )

    def _verdict(self, line: bytes) -> str | None:
        key = blake2b(line, digest_size=16).digest()
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._tried(line)
                if len(self._verdicts) > MAX_REMEMBERED:
                    del self._verdicts[next(iter(self._verdicts))]
            return self._verdicts[key]

    def _tried(self, line: bytes) -> str | None:
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise RuleProcessEnded(f"the process that tries rules ended with {process.wait()}")
        return msgspec.json.decode(answer, type=str | None)

    def _started(self) -> Popen[bytes]:
        """In a session of its own: an interrupt from the terminal is not for it."""
        process = Popen(self._command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        weakref.finalize(self, _end, process)
        return process


def _end(process: Popen[bytes]) -> None:
    """With its input closed it has nothing to do. What it was not told is of no use any more."""
    with suppress(BrokenPipeError), process:
        pass
