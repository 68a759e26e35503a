"""What the wire codec alone costs: each frame of the step path, encoded and decoded.

    python benchmarks/wire_codec.py [--rows 1 64 256 1024]

Prints, per frame and number of rows, microseconds to encode and to decode (the best of many short
runs, CPU time) and the size of the frame. "arrays" is what decoding leaves out: packing and
unpacking the int32 arrays as Python lists, which a receiver with numpy does not need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from pagemesh.shared.engine_messages import NewRow, Step, StepResult, Submit, Tokens
from pagemesh.shared.messages import Delta, Deltas
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.step_rows import StepRows
from pagemesh.shared.wire import Message, decode, encode, pack_ids, unpack_ids

BLOCK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 128
REPEATS: Final = 200
RUN_S: Final = 0.002


class Case(NamedTuple):
    """A frame, and what its ends do with the arrays in it."""

    name: str
    message: Message
    arrays: Callable[[], Any] = lambda: None


def cases(rows: int) -> Iterator[Case]:
    slots = list(range(rows))
    ids = [30_000 + slot for slot in slots]
    packed = pack_ids(ids)
    yield Case("Step, steady", steady_step(rows))
    joined = steady_step(rows)._replace(joined=pack_ids(slots))
    yield Case("Step, all rows new to the order", joined, lambda: StepRows().follow(joined))
    yield Case("Step, all rows enter", entering_step(rows))
    yield Case("StepResult", StepResult(1, 2, packed), lambda: (pack_ids(ids), unpack_ids(packed)))
    yield Case(
        "Tokens",
        Tokens("engine-1", pack_ids(slots), pack_ids([1] * rows), packed),
        lambda: (pack_ids(slots), pack_ids(ids), unpack_ids(packed), unpack_ids(packed)),
    )
    yield Case("Deltas", Deltas([Delta(f"r-{i:032}", 0, " word", pack_ids([i])) for i in slots]))
    if rows == 1:
        yield Case("Submit", submission())


def steady_step(rows: int) -> Step:
    """A sixteenth of the rows fill a block, publish it and get a new one."""
    filled = -(-rows // BLOCK_TOKENS)
    return Step(
        epoch=time.time_ns(),
        step=100_001,
        base=100_000,
        n_rows=rows,
        n_tokens=rows,
        grown=pack_ids(range(2 * filled)),
        sealed=pack_ids(range(filled)),
        sealed_hashes=bytes(16 * filled),
    )


def entering_step(rows: int) -> Step:
    prompt = pack_ids(range(PROMPT_TOKENS))
    blocks = pack_ids(range(PROMPT_TOKENS // BLOCK_TOKENS))
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
    new = [NewRow(slot, prompt, PROMPT_TOKENS, 1, params, blocks, 0, "r") for slot in range(rows)]
    chunks = pack_ids(n for slot in range(rows) for n in (slot, PROMPT_TOKENS))
    step = steady_step(rows)
    return step._replace(new=new, chunks=chunks, n_tokens=rows * PROMPT_TOKENS)


def submission() -> Submit:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
    prompt, hashes = pack_ids(range(PROMPT_TOKENS)), bytes(16 * PROMPT_TOKENS // BLOCK_TOKENS)
    return Submit(1, "r" * 32, 0, "engine-1", prompt, b"", 1, params, hashes)


def best_us(call: Callable[[], Any]) -> float:
    """CPU microseconds of one call."""
    n, best = 1, float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for _ in range(n):
            call()
        spent = time.thread_time() - start
        best = min(best, spent / n)
        n = max(1, round(RUN_S / max(best, 1e-7)))
    return best * 1e6


def measure(case: Case, rows: int) -> None:
    frame = encode(case.message)
    assert decode(frame) == case.message
    encoding, decoding = best_us(lambda: encode(case.message)), best_us(lambda: decode(frame))
    print(
        f"{case.name:32} {rows:5} rows: encode {encoding:8.1f} us, decode {decoding:8.1f}, "
        f"arrays {best_us(case.arrays):7.1f}; {len(frame):7} bytes, {len(frame) / rows:6.1f} a row"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    args = parser.parse_args()
    for rows in args.rows:
        for case in cases(rows):
            measure(case, rows)


if __name__ == "__main__":
    main()
