"""What taking a worker over costs, by the size of its pool, every block of it cached.

    python benchmarks/takeover.py [--blocks 10000 100000]

Prints milliseconds: the worker takes stock, both ends handle the frames, the scheduler makes a
block manager (which it does anyway) and begins with what it was told. And, in microseconds a step,
what a worker pays for remembering.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pagemesh.scheduler_svc.blocks import BlockManager
from pagemesh.scheduler_svc.takeover import trusted_contents
from pagemesh.shared.engine_messages import Step
from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.wire import decode, encode
from pagemesh.worker_svc.pages import PageContents

CARD = ModelCard(["tiny"], 1, 64, 16, "float32", [5], 1, "f", 0)
ROUNDS = 20_000
T = TypeVar("T")


def timed(name: str, work: Callable[[], T]) -> T:
    began_s = time.perf_counter()
    done = work()
    print(f"  {name:<22} {1e3 * (time.perf_counter() - began_s):8.1f} ms")
    return done


def step(sealed: np.ndarray, **more: bytes) -> Step:
    hashes = np.random.default_rng(0).integers(1, 2**62, (len(sealed), 2), dtype=np.uint64)
    packed = sealed.astype("<i4").tobytes()
    return Step(1, 1, 0, 0, 0, sealed=packed, sealed_hashes=hashes.tobytes(), **more)


def take_over(n_blocks: int) -> None:
    print(f"{n_blocks} blocks")
    pages = PageContents(n_blocks)
    pages.follow(step(np.arange(1, n_blocks)), [], 16)
    told = timed("worker: stock", lambda: pages.told(1, CARD))
    frames = timed("worker: frames", lambda: [encode(held) for held in told])
    read = timed("scheduler: frames", lambda: [decode(frame) for frame in frames])
    offered = EngineStatus("e", CARD, Capacity(n_blocks, 1, 1, 1, "cpu"), EngineStats())
    contents = timed("scheduler: checks", lambda: trusted_contents(read, 1, offered))  # type: ignore[arg-type]
    blocks = timed("scheduler: a pool", lambda: BlockManager(n_blocks))
    timed("scheduler: adopts", lambda: blocks.adopt(contents))


def remember(n_rows: int) -> None:
    """A step in which `n_rows` rows fill a block and get another."""
    pages = PageContents(100_000)
    chosen = np.random.default_rng(0).permutation(99_999) + 1
    grown = np.stack([np.arange(n_rows), chosen[:n_rows]], axis=1).astype("<i4")
    filled = step(chosen[n_rows : 2 * n_rows], grown=grown.tobytes())
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        pages.follow(filled, [], 16)
    a_step_us = 1e6 * (time.perf_counter() - began_s) / ROUNDS
    print(f"a step in which {n_rows} rows fill a block: {a_step_us:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000])
    for n_blocks in parser.parse_args().blocks:
        take_over(n_blocks)
    for n_rows in (1, 16, 64):
        remember(n_rows)


if __name__ == "__main__":
    main()
