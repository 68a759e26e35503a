"""A process that tries rules, since clients write them: preparing one may take llguidance minutes,
or more stack than there is, which ends the process it happens in.

It reads the vocabulary once, and a rule a line from its standard input; each is tried in a fork,
under limits, and answered by a line: null, or the reason why the rule cannot be followed. It ends
with its input. What passes here, workers prepare with more time and stack.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from pagemesh.shared.grammar import GrammarError, GrammarVocabulary
from pagemesh.shared.structured_outputs import StructuredOutputsParams

CPU_S: Final = 1.0
"""A worker prepares the rule again, and its batch waits."""
STACK_BYTES: Final = 2**20
"""Half of what the threads have that make masks."""
MEMORY_BYTES: Final = 2 * 2**30
MAX_REASON_CHARS: Final = 500
"""It may quote the rule."""
TOO_LARGE: Final = "it is nested too deeply, or takes too long to prepare; make it simpler"


def run(vocabulary: GrammarVocabulary) -> None:
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _try_and_exit(vocabulary, line)
        _, status = os.waitpid(child, 0)
        if status != 0:
            _answer(TOO_LARGE)


def _try_and_exit(vocabulary: GrammarVocabulary, line: bytes) -> NoReturn:
    """In the fork. The timer's signal ends a process that has no handler for it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    threading.stack_size(STACK_BYTES)
    faults: list[str | None] = []
    trial = threading.Thread(target=lambda: faults.append(_fault(vocabulary, line)))
    trial.start()
    trial.join()
    if not faults:
        os._exit(1)
    _answer(faults[0])
    os._exit(0)


def _fault(vocabulary: GrammarVocabulary, line: bytes) -> str | None:
    try:
        vocabulary.check(msgspec.json.decode(line, type=StructuredOutputsParams))
    except GrammarError as error:
        return error.reason[:MAX_REASON_CHARS]
    except MemoryError:
        return TOO_LARGE
    return None


def _answer(fault: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(fault) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    folder, vocab_tokens, *eos_token_ids = sys.argv[1:]
    run(GrammarVocabulary(Path(folder), int(vocab_tokens), [int(each) for each in eos_token_ids]))
