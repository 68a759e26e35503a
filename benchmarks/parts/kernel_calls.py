"""Every kernel of a GPU, called at small and awkward shapes: rows of unequal length, page borders,
padding, sizes that fill no tile. What they compute is for the tests to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.batch import ROW_WORDS, WRITE_WORDS, BatchState, StepBuffers
from pagemesh.kernels.gpu.activation import silu_mul
from pagemesh.kernels.gpu.attention import paged_attention
from pagemesh.kernels.gpu.batch import gather_rows, scatter_writes
from pagemesh.kernels.gpu.decode_attention import decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig
from pagemesh.kernels.gpu.embedding import embed_rms_norm
from pagemesh.kernels.gpu.grammar_mask import apply_masks
from pagemesh.kernels.gpu.logprobs import token_logprobs
from pagemesh.kernels.gpu.norm import add_rms_norm, rms_norm
from pagemesh.kernels.gpu.penalties import add_edits, apply_penalties, count_tokens, widen
from pagemesh.kernels.gpu.rope_store import rope_store
from pagemesh.kernels.gpu.row_params import ROW_WORDS as PARAM_ROW_WORDS
from pagemesh.kernels.gpu.row_params import SamplingRows
from pagemesh.kernels.gpu.sampling import SampledTokens, sample_rows
from pagemesh.kernels.gpu.skinny import skinny_gate_up, skinny_linear
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.kernels.sample_rows import PARAMS

EPS = 1e-6
VOCAB_TOKENS = 4500
"""More than one slice of the samplers, and no whole number of them."""
HIDDEN = 200
ROW_TOKENS = 300


class Call(NamedTuple):
    name: str
    run: Callable[[], object]


class Where(NamedTuple):
    """Tensors are of `dtype` on `device`."""

    device: str
    dtype: torch.dtype

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def ints(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self.device)


def kernel_calls(device: str, dtype: torch.dtype) -> Iterator[Call]:
    where = Where(device, dtype)
    for calls in (
        _batches,
        _norms,
        _activations,
        _ropes,
        _decodes,
        _mixed_steps,
        _linears,
        _samplers,
        _penalties,
        _masks,
        _logprobs,
    ):
        yield from calls(where)


# -- the batch ------------------------------------------------------------------------------------


def _batches(where: Where) -> Iterator[Call]:
    for block_tokens in (16, 64):
        yield Call(f"gather_rows pages of {block_tokens}", partial(_gather, where, block_tokens))
    yield Call("scatter_writes", partial(_scatter, where))


def _state(where: Where) -> BatchState:
    shapes = (5, ROW_TOKENS), (5, 24), (5, PARAM_ROW_WORDS)
    return BatchState(*(where.ints(np.ones(shape)) for shape in shapes))


def _gather(where: Where, block_tokens: int) -> None:
    """Decodes on both sides of a page border, a chunk from a page's middle, padding."""
    plan = [(3, 15, 1), (0, 16, 1), (1, 0, 100), (2, 37, ROW_TOKENS - 37), (-1, 0, 1), (-1, 0, 1)]
    firsts = np.cumsum([0, *(n for *_, n in plan)])
    rows = [[*row, first] for row, first in zip(plan, firsts, strict=False)]
    buffers = StepBuffers.empty(len(plan), int(firsts[-1]), 24, torch.device(where.device))
    assert len(rows[0]) == ROW_WORDS
    gather_rows(where.ints(rows), _state(where), block_tokens, buffers)


def _scatter(where: Where) -> None:
    """To the first and last words of every field."""
    state, header, values = _state(where), list[list[int]](), list[int]()
    for field, tensor in enumerate(state):
        for first, n in ((0, 3), (tensor.numel() - 7, 7), (9, 1)):
            header.append([field, first, len(values), n])
            values += range(n)
    for write in header:
        write[2] += len(header) * WRITE_WORDS
    words = [*np.ravel(header).tolist(), *values]
    scatter_writes(where.ints(words), len(header), state)


# -- between the matrices -------------------------------------------------------------------------


def _linear_output(where: Where, rows: int, columns: int, splits: int) -> Tensor:
    """Whole, or in K-splits."""
    if splits == 1:
        return where.random(rows, columns)
    return where.random(splits, rows, columns, dtype=torch.float32)


def _norms(where: Where) -> Iterator[Call]:
    weight, table = where.random(HIDDEN), where.random(11, HIDDEN)
    ids = where.ints([0, 10, 3], torch.int64)
    yield Call("embed_rms_norm", partial(embed_rms_norm, ids, table, weight, EPS))
    for splits in (1, 3):
        x, residual = _linear_output(where, 3, HIDDEN, splits), where.random(3, HIDDEN)
        yield Call(f"rms_norm S={splits}", partial(rms_norm, x, weight, EPS))
        yield Call(f"add_rms_norm S={splits}", partial(add_rms_norm, x, residual, weight, EPS))


def _activations(where: Where) -> Iterator[Call]:
    for splits in (1, 3):
        gate_up = _linear_output(where, 3, 2 * HIDDEN, splits)
        yield Call(f"silu_mul S={splits}", partial(silu_mul, gate_up, dtype=where.dtype))


def _ropes(where: Where) -> Iterator[Call]:
    shapes = [(4, 2, 64), (9, 3, 80), (3, 1, 128), (2, 2, 256)]
    for (heads, kv_heads, dim), splits in product(shapes, (1, 2)):
        yield Call(
            f"rope_store {heads}/{kv_heads} heads of {dim} S={splits}",
            partial(_rope, where, heads, kv_heads, dim, splits),
        )


def _rope(where: Where, heads: int, kv_heads: int, dim: int, splits: int) -> Tensor:
    """Into a pool's first and last slots, with a token that goes nowhere; with norms and bias."""
    columns = (heads + 2 * kv_heads) * dim
    caches = [where.random(3, kv_heads, 16, dim) for _ in range(2)]
    return rope_store(
        _linear_output(where, 3, columns, splits),
        where.ints([0, 39, 7], torch.int64),
        where.random(40, dim, dtype=torch.float32),
        where.ints([16, 47, -1], torch.int64),
        *caches,
        n_heads=heads,
        bias=where.random(columns),
        q_norm=where.random(dim),
        k_norm=where.random(dim),
        eps=EPS,
    )


# -- attention ------------------------------------------------------------------------------------


class Pages(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    inputs: AttentionInputs


def _pages(
    where: Where, heads: tuple[int, int, int], page: int, rows: list[tuple[int, int]], n_decode: int
) -> Pages:
    """`heads`: query heads, KV heads, head dimension. `rows`: (query tokens, context tokens), the
    last pages of the pool included. Two padding tokens follow the rows that are no decodes."""
    n_heads, kv_heads, dim = heads
    spans = [-(-context // page) for _, context in rows]
    blocks = iter(range(sum(spans), 0, -1))
    tables = np.zeros((len(rows), max(spans)), np.int32)
    for table, span in zip(tables, spans, strict=True):
        table[:span] = [next(blocks) for _ in range(span)]
    starts = np.cumsum([0, *(n for n, _ in rows)])
    n_tokens = int(starts[-1]) + 2 * (n_decode < len(rows))
    shape = (1 + sum(spans), kv_heads, page, dim)
    inputs = AttentionInputs(
        query_start=where.ints(starts),
        seq_lens=where.ints([context for _, context in rows]),
        block_tables=where.ints(tables),
        slot_mapping=where.ints([-1] * n_tokens, torch.int64),
        max_query_tokens=max(n for n, _ in rows),
        max_seq_tokens=max(context for _, context in rows),
        n_decode=n_decode,
    )
    return Pages(
        where.random(n_tokens, n_heads, dim), where.random(*shape), where.random(*shape), inputs
    )


def _decodes(where: Where) -> Iterator[Call]:
    """Rows that end before, on and behind a page border, one of several chunks, one of padding."""
    rows = [(1, 1), (1, 16), (1, 17), (1, 0), (1, 130), (1, 63)]
    small = DecodeConfig(tile_tokens=16, chunk_tokens=32, max_chunks=3)
    shapes = [((4, 2, 64), 16), ((7, 1, 80), 32), ((6, 2, 128), 64), ((2, 2, 256), 16)]
    for (heads, page), window in product(shapes, (None, 20)):
        pages = _pages(where, heads, page, rows, len(rows))
        for config, kind in ((small, "small chunks"), (None, "own choice")):
            yield Call(
                f"decode_attention {heads} pages of {page} window {window} {kind}",
                partial(
                    decode_attention, *pages, scale=heads[2] ** -0.5, window=window, config=config
                ),
            )
    for heads, page in (((4, 2, 64), 16), ((6, 2, 128), 64)):
        yield Call(
            f"decode_attention {heads} pages of {page} in common",
            partial(_decode_together, where, heads, page),
        )


def _decode_together(where: Where, heads: tuple[int, int, int], page: int) -> None:
    """Rows with a common prefix, and enough of them that they are computed together."""
    config = DecodeConfig(tile_tokens=16, chunk_tokens=64, max_chunks=3, programs_per_sm=1)
    rows = [(1, 190), (1, 64), (1, 0), (1, 130), (1, 170)] * (1 + config.programs // 8)
    pages = _pages(where, heads, page, rows, len(rows))
    pages.inputs.block_tables[:, : 128 // page] = pages.inputs.block_tables[0, : 128 // page]
    decode_attention(*pages, scale=heads[2] ** -0.5, config=config)
    kept = next(iter(pages.inputs.plans.values()))
    assert kept.shared.n_items.item() > 0, "none was computed together"


def _mixed_steps(where: Where) -> Iterator[Call]:
    """Decodes, then chunks with and without a past, then an empty row."""
    rows = [(1, 40), (1, 0), (9, 9), (17, 50), (3, 33), (0, 0)]
    shapes = [((4, 2, 64), 16), ((3, 1, 80), 16), ((8, 2, 128), 64), ((2, 1, 256), 16)]
    for (heads, page), window in product(shapes, (None, 13)):
        pages = _pages(where, heads, page, rows, 2)
        counted = replace(pages.inputs, n_decode=len(rows), counts=where.ints([len(rows), 2]))
        for kind, inputs in (("", pages.inputs), (" counted", counted)):
            given = pages._replace(inputs=inputs)
            yield Call(
                f"paged_attention {heads} pages of {page} window {window}{kind}",
                partial(paged_attention, *given, scale=heads[2] ** -0.5, window=window),
            )


# -- matrices -------------------------------------------------------------------------------------


def _linears(where: Where) -> Iterator[Call]:
    """Rows, features and K that fill no tile, by both ways to load."""
    for tma, splits, n_rows in product((True, False), (1, 2), (1, 17)):
        small = where.device == "cpu"
        config = SkinnyConfig(
            block_n=16 if small else 64, block_k=32 if small else 64, splits=splits, tma=tma
        )
        x, w, bias = where.random(n_rows, 152), where.random(72, 152), where.random(72)
        name = f"{n_rows} rows tma={tma}"
        yield Call(
            f"skinny_linear {name} S={splits}",
            partial(skinny_linear, x, w, bias if splits == 1 else None, config=config),
        )
        if splits == 1:
            gates = where.random(2 * 72, 152)
            yield Call(
                f"skinny_gate_up {name}",
                partial(skinny_gate_up, x, gates, config=config),
            )


# -- sampling -------------------------------------------------------------------------------------

# (top_k, inverse temperature, top_p, log min_p) of each row.
_WAYS = [
    (0, 0.0, 1.0, -np.inf),
    (0, 1.0, 1.0, -np.inf),
    (5, 1.4, 1.0, -np.inf),
    (1000, 0.7, 0.9, -np.inf),
    (0, 1.0, 0.999, -3.0),
    (0, 1.0, 0.5, -np.inf),
]


def _sampling_rows(where: Where) -> SamplingRows:
    """The last row is padding; every other one is penalised."""
    params = np.zeros(len(_WAYS), PARAMS)
    for row, (top_k, inverse, top_p, log_min_p) in enumerate(_WAYS):
        counted = row // 2 if row % 2 == 0 else -1
        params[row] = (row, top_k, counted, inverse, top_p, log_min_p, 1.2, 0.3, 0.1)
    words = np.zeros((len(_WAYS), PARAM_ROW_WORDS), np.int32)
    words[:, : PARAMS.itemsize // 4] = params.view(np.int32).reshape(len(_WAYS), -1)
    slots = [*range(len(_WAYS) - 1), -1]
    return SamplingRows(where.ints(words), where.ints(slots), where.ints([0, 1, 2, 3, 39, 0]))


def _samplers(where: Where) -> Iterator[Call]:
    rows, n_rows = _sampling_rows(where), len(_WAYS)
    shapes = ((2, n_rows), (n_rows, 40))
    for filtered, vocab in product((False, True), (VOCAB_TOKENS, 65)):
        logits = where.random(n_rows, vocab)
        out = SampledTokens(*(where.ints(np.zeros(shape)) for shape in shapes))
        yield Call(
            f"sample_rows filtered={filtered} of {vocab}",
            partial(sample_rows, logits, rows, out, filtered=filtered),
        )


def _penalties(where: Where) -> Iterator[Call]:
    rows, n_rows = _sampling_rows(where), len(_WAYS)
    logits, wide = where.random(n_rows, VOCAB_TOKENS), where.random(n_rows, VOCAB_TOKENS).float()
    counts = where.ints(np.zeros((3, VOCAB_TOKENS)))
    values = np.array([1.5, -np.inf, -2.0], np.float32).view(np.int32)
    edits = where.ints([[0, 4, 4], [0, VOCAB_TOKENS - 1, 7], values])
    tokens = where.ints([0, 5, VOCAB_TOKENS - 1, 5, 9, 0])
    out = SampledTokens(where.ints(np.zeros((2, n_rows))), where.ints(np.zeros((n_rows, 40))))
    yield Call("widen", partial(widen, logits))
    yield Call("add_edits", partial(add_edits, wide, edits))
    yield Call("apply_penalties", partial(apply_penalties, wide, rows, counts.bool(), counts))
    yield Call("count_tokens", partial(count_tokens, tokens, rows, counts.bool(), counts))
    yield Call(
        "sample_rows edited", partial(sample_rows, wide, rows, out, filtered=True, edited=True)
    )


def _masks(where: Where) -> Iterator[Call]:
    """Of every other row; the last word of a mask is not full."""
    wide = where.random(len(_WAYS), VOCAB_TOKENS).float()
    rows = where.ints(np.arange(0, len(_WAYS), 2))
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (len(rows), -(-VOCAB_TOKENS // 32)))
    yield Call("apply_masks", partial(apply_masks, wide, rows, where.ints(words)))


def _logprobs(where: Where) -> Iterator[Call]:
    logits = where.random(4, VOCAB_TOKENS)
    rows, chosen = where.ints([3, 0], torch.int64), where.ints([VOCAB_TOKENS - 1, 0])
    for top in (0, 5):
        yield Call(f"token_logprobs top {top}", partial(token_logprobs, logits, rows, chosen, top))
