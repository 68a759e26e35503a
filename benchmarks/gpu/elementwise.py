"""The kernels between a layer's matrices: microseconds a launch, GB/s where there are many rows.

    python benchmarks/gpu/elementwise.py --compile-only
    python benchmarks/gpu/elementwise.py

First each kernel is held against its reference in bfloat16. Then each is launched many times in one
CUDA graph, with programmatic dependent launch (the first figure) and without it (the second). Few
rows find their input in the L2 cache, as they do behind the layer before them; many rows take turns
on more buffers than it holds. `--compile-only` fills Triton's cache from several processes.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from parts.agreement import poison, relative_error
from parts.card_clock import launch_us
from parts.model_shapes import SHAPES
from torch import Tensor

from pagemesh.kernels import activation as activation_reference
from pagemesh.kernels import norm as norm_reference
from pagemesh.kernels import rope_store as rope_store_reference
from pagemesh.kernels.gpu import activation, embedding, norm, rope_store
from pagemesh.kernels.gpu.activation import ActivationConfig
from pagemesh.kernels.gpu.norm import NormConfig
from pagemesh.kernels.gpu.rope_store import RopeStoreConfig
from pagemesh.kernels.linear import join_splits
from pagemesh.worker_svc.models.config import DecoderConfig

DTYPE = torch.bfloat16
MODELS = {name: DecoderConfig.from_dict(raw) for name, raw in SHAPES.items()}
EPS = 1e-6
VOCAB_TOKENS = 32_000
BLOCK_TOKENS = 16
MAX_POSITIONS = 40_960
FEW_ROWS = [1, 8, 64, 256]
MANY_ROWS = 8192
SPLITS = [1, 2, 4]
L2_BYTES = 60e6
MAX_ERROR = 2e-3
"""A reduction in another order turns a rounding over here and there."""
LAUNCHES = {True: 20, False: 100}
"""In a graph, by whether the rows are many."""


@dataclass(frozen=True)
class Work:
    """One launch on buffers of its own. Reference and kernel may update them in place."""

    run: Callable[[Any], Sequence[Tensor]]
    """Takes a configuration, or None for the kernel's own choice."""
    reference: Callable[[], Sequence[Tensor]]
    moved_bytes: int


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def linear_output(rows: int, columns: int, splits: int) -> Tensor:
    """Whole, or in K-splits."""
    if splits == 1:
        return random(rows, columns)
    return random(splits, rows, columns, dtype=torch.float32)


def norm_work(model: DecoderConfig, rows: int, splits: int) -> Work:
    x, residual = linear_output(rows, model.hidden_size, splits), random(rows, model.hidden_size)
    weight, kept = random(model.hidden_size), residual.clone()
    return Work(
        lambda config: norm.add_rms_norm(x, residual, weight, EPS, config=config),
        lambda: norm_reference.add_rms_norm(join_splits(x, DTYPE), kept, weight, EPS),
        x.nbytes + 3 * residual.nbytes,
    )


def embedding_work(model: DecoderConfig, rows: int, splits: int) -> Work:
    token_ids = torch.randint(VOCAB_TOKENS, (rows,), device="cuda")
    table, weight = random(VOCAB_TOKENS, model.hidden_size), random(model.hidden_size)

    def reference() -> tuple[Tensor, Tensor]:
        total = table[token_ids]
        return norm_reference.rms_norm(total, weight, EPS), total

    return Work(
        lambda config: embedding.embed_rms_norm(token_ids, table, weight, EPS, config=config),
        reference,
        3 * rows * table[0].nbytes,
    )


def activation_work(model: DecoderConfig, rows: int, splits: int) -> Work:
    gate_up = linear_output(rows, 2 * model.intermediate_size, splits)
    return Work(
        lambda config: [activation.silu_mul(gate_up, dtype=DTYPE, config=config)],
        lambda: [activation_reference.silu_mul(join_splits(gate_up, DTYPE))],
        gate_up.nbytes + rows * model.intermediate_size * DTYPE.itemsize,
    )


def rope_store_work(model: DecoderConfig, rows: int, splits: int) -> Work:
    columns = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    blocks = rows // BLOCK_TOKENS + 2
    qkv = linear_output(rows, columns, splits)
    tables = (
        torch.randint(MAX_POSITIONS, (rows,), device="cuda"),
        random(MAX_POSITIONS, model.head_dim, dtype=torch.float32),
        torch.randperm((blocks - 1) * BLOCK_TOKENS, device="cuda")[:rows] + BLOCK_TOKENS,
    )
    pool = random(4, blocks, model.n_kv_heads, BLOCK_TOKENS, model.head_dim)
    pool[2:] = pool[:2]
    norms = random(2, model.head_dim) if model.qk_norm else [None, None]
    options: dict[str, Any] = {"n_heads": model.n_heads, "q_norm": norms[0], "k_norm": norms[1]}

    def run(config: Any) -> list[Tensor]:
        caches = pool[:2].unbind()
        q = rope_store.rope_store(qkv, *tables, *caches, **options, eps=EPS, config=config)
        return [q, *caches]

    def reference() -> list[Tensor]:
        caches = pool[2:].unbind()
        return [rope_store_reference.rope_store(qkv, *tables, *caches, **options, eps=EPS), *caches]

    rotated = rows * model.head_dim * torch.float32.itemsize
    return Work(run, reference, qkv.nbytes + rows * columns * DTYPE.itemsize + rotated)


NORMS = [NormConfig(num_warps) for num_warps in (2, 4, 8, 16, 32)]
WORKS: dict[str, tuple[Callable[[DecoderConfig, int, int], Work], Sequence[Any]]] = {
    "add_rms_norm": (norm_work, NORMS),
    "embed_rms_norm": (embedding_work, NORMS),
    "silu_mul": (
        activation_work,
        [
            ActivationConfig(block, num_warps)
            for block, num_warps in ((512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
        ],
    ),
    "rope_store": (
        rope_store_work,
        [
            RopeStoreConfig(heads, num_warps)
            for heads, num_warps in ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4))
        ],
    ),
}


@dataclass(frozen=True)
class Variant:
    kernel: str
    model: str
    splits: int
    config: Any
    """None: the kernel's own choice."""

    def work(self, rows: int) -> Work:
        return WORKS[self.kernel][0](MODELS[self.model], rows, self.splits)

    def __str__(self) -> str:
        choice = "default" if self.config is None else str(self.config).partition("(")[2][:-1]
        return f"{self.kernel:14} {self.model:>10} S={self.splits} {choice:24}"


def variants() -> Iterator[Variant]:
    """Each kernel's own choice for every number of splits, then the choices it has."""
    for model, (kernel, (_, configs)) in product(MODELS, WORKS.items()):
        for splits in SPLITS if kernel != "embed_rms_norm" else SPLITS[:1]:
            yield Variant(kernel, model, splits, None)
        for config in configs:
            yield Variant(kernel, model, 1, config)


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (norm, embedding, activation, rope_store):
            stack.enter_context(patch.object(module, "pdl", lambda: on))
        yield


def compile_variant(variant: Variant) -> None:
    """Both with and without dependent launch; a launch on one row compiles for any number."""
    work = variant.work(1)
    for on in (True, False):
        with dependent_launch(on):
            work.run(variant.config)
    torch.cuda.synchronize()


def compile_all(processes: int) -> None:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, variants()))


def check(variant: Variant, rows: int) -> float:
    """The largest relative error of the outputs, which begin as NaN."""
    work = variant.work(rows)
    expected = work.reference()
    poison(*(tensor.nbytes for tensor in expected))
    got = work.run(variant.config)
    errors = [relative_error(*pair) for pair in zip(got, expected, strict=True)]
    if not all(error < MAX_ERROR for error in errors):
        raise SystemExit(f"{variant} at {rows} rows: relative errors {errors}")
    return max(errors)


def replayed_us(works: list[Work], config: Any, launches: int) -> float:
    """Of each of `launches`, which take turns on `works`. As many results are kept apart."""
    kept = deque[Sequence[Tensor]](maxlen=len(works))

    def run(work: Work) -> None:
        kept.append(work.run(config))

    return launch_us([partial(run, works[launch % len(works)]) for launch in range(launches)])


def cell(variant: Variant, rows: int) -> str:
    many = rows == MANY_ROWS
    works = [variant.work(rows)]
    if many:
        turns = int(4 * L2_BYTES // works[0].moved_bytes) + 1
        works += [variant.work(rows) for _ in range(turns)]
    times = []
    for on in (True, False):
        with dependent_launch(on):
            times.append(replayed_us(works, variant.config, LAUNCHES[many]))
    speed = f" {works[0].moved_bytes / min(times) / 1000:5.0f}" if many else ""
    return f"{times[0]:7.2f}/{times[1]:6.2f}{speed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    if arguments.compile_only:
        compile_all(arguments.processes)
        return
    # A capture collects garbage first: little of it, so.
    gc.freeze()
    for variant in variants():
        if variant.config is None:
            errors = "  ".join(f"{rows}: {check(variant, rows):.1e}" for rows in (1, 77, MANY_ROWS))
            print(f"{variant} relative error at rows {errors}")
    print(f"\n{'us with/without dependent launch, at rows':56}", end="")
    print("".join(f"{rows:>14}" for rows in FEW_ROWS), f"{MANY_ROWS:>14}  GB/s")
    for variant in variants():
        rows = [*FEW_ROWS, *[MANY_ROWS] * (variant.splits == 1)]
        print(f"{variant}", *(cell(variant, each) for each in rows), flush=True)


if __name__ == "__main__":
    main()
