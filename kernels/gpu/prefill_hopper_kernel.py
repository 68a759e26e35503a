"""The warpgroups that compute the prefill attention for Hopper (FlashAttention-3, Shah et al.).

A piece of work is `pack` query heads of one KV head for `wg_tokens` tokens a warpgroup, against
tiles of keys from the first that any of its queries sees to the last. Tiles begin at multiples of
their size in the sequence and a query meets them in order: its bits depend on nothing else.

Barriers. Queries, keys and values each have a ring of stages with two barriers a stage.
- `ready`, one arrival a round: the loader's, which also expects the bytes of the copies.
- `free`, one arrival of each warpgroup a round, once its last product that reads the stage is done.
Round r of a stage has parity r & 1. A reader waits for parity r & 1 of `ready`. The loader waits
for parity (r - 1) & 1 of `free`: round 0 passes, for the round before an unused barrier's first
counts as complete. Nobody can be two rounds off: a stage is not filled again before every reader
has freed it, and not freed before it was filled.
- `turns`, one barrier a warpgroup, one arrival a round by the warpgroup before it: the products of
  a tile are issued in turn, so that one's softmax runs beside the other's products.

Proxies. Copies and products go past the path of loads and stores. Where a warpgroup writes to
shared memory itself (zeros behind the last key, its output in the queries' place), a fence comes
before whoever touches that memory next in the other way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemesh.kernels.gpu.prefill_hopper_load import (
    PANEL,
    ROWS,
    Batch,
    Ring,
    load,
    next_stage,
    work_of,
)

# Stands for "nothing seen yet": below every score, and its difference to itself is not NaN.
LOWEST = gl.constexpr(-1e38)


@gluon.jit
def _mask(scores, start, first, window, CUT: gl.constexpr):
    """Minus infinity for what a query does not see, in tiles where that can be."""
    hidden = start + CUT.tile > first + 1
    if CUT.windowed:
        hidden = hidden | (start < first + CUT.wg_tokens - window)
    if hidden:
        layout: gl.constexpr = scores.type.layout
        key = start + gl.arange(0, CUT.tile, gl.SliceLayout(0, layout))[None, :]
        position = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] // CUT.pack
        seen = key <= position
        if CUT.windowed:
            seen = seen & (key > position - window)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(scores, best, log2_scale):
    """Weights exp2(score - best) with the new best, and what they make of weights so far."""
    new_best = gl.maximum(best, gl.max(scores, 1) * log2_scale)
    weights = gl.exp2(scores * log2_scale - new_best[:, None])
    return weights, new_best, gl.exp2(best - new_best)


@gluon.jit
def _clear(ring, slot, keys, CUT: gl.constexpr):
    """Zero the values from `keys` on to the end of their page: they are someone else's, and may be
    such as spoil sums even with a weight of zero. Every warpgroup does so for itself; the others
    write the same."""
    rows: gl.constexpr = 16
    panels: gl.constexpr = CUT.panels
    slices: gl.constexpr = CUT.tile // rows
    shape: gl.constexpr = [CUT.stages * CUT.panels * slices, rows, PANEL]
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, PANEL], ring.stages.dtype)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = ring.stages._reinterpret(ring.stages.dtype, shape, memory)
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))
    page_end = gl.minimum((keys + CUT.page - 1) // CUT.page * CUT.page, CUT.tile)
    for panel in gl.static_range(panels):
        for n in range(keys // rows, page_end // rows):
            part = parts.index((slot * CUT.panels + panel) * slices + n)
            there = (n * rows + row < keys)[:, None]
            part.store(gl.where(there, part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _store(stage, mixed, out, out_stride, work, first_token, CUT: gl.constexpr):
    """Through the queries' place in shared memory, so that neighbouring threads write what lies
    together."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // CUT.head_dim, CUT.head_dim // 8], [4, 1], [1, 0]
    )
    stage.store(mixed.to(stage.dtype))
    rows = stage.load(layout)
    query = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = first_token + query // CUT.pack
    head = work.bundle * CUT.pack + query % CUT.pack
    dim = gl.arange(0, CUT.head_dim, gl.SliceLayout(0, layout))
    at = token.to(gl.int64) * out_stride + head * CUT.head_dim
    gl.store(out + at[:, None] + dim[None, :], rows, mask=(token < work.row_end)[:, None])
    fence_async_shared()


@gluon.jit
def _attend(
    queries,
    keys,
    values,
    turns,
    batch,
    out,
    out_stride,
    log2_scale,
    ME: gl.constexpr,
    CUT: gl.constexpr,
):
    """Warpgroup number ME. Of a tile's two products, the second waits for the next tile's first:
    the tensor cores mix the values of one tile while the next one's weights are made."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CUT.tile, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CUT.head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    stages: gl.constexpr = CUT.stages
    query_stages: gl.constexpr = CUT.query_stages
    nothing = gl.full([ROWS, CUT.tile], 0.0, gl.float32, s_layout)
    q_slot = 0
    q_phase = 0
    slot = 0
    phase = 0
    # The first warpgroup has the first turn.
    turn_phase = 1 if ME == 0 else 0
    for turn in range(batch.rounds):
        work = work_of(batch, turn, CUT)
        if work.begin < work.end:
            first_token = work.token + ME * CUT.wg_tokens
            first = first_token + work.seq_len - work.row_end
            mbarrier.wait(queries.ready.index(q_slot), q_phase)
            q = queries.stages.index(q_slot * CUT.warpgroups + ME)

            mbarrier.wait(keys.ready.index(slot), phase)
            k = keys.stages.index(slot).permute([1, 0])
            scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(keys.free.index(slot))
            scores = _mask(scores, work.begin * CUT.tile, first, batch.window, CUT)
            best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
            weights, best, shrink = _weigh(scores, best, log2_scale)
            weight = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(q.dtype), p_layout)
            total = gl.full([ROWS, CUT.head_dim], 0.0, gl.float32, o_layout)

            v_slot = slot
            v_phase = phase
            slot, phase = next_stage(slot, phase, stages)
            mbarrier.wait(keys.ready.index(slot), phase, pred=work.begin + 1 < work.end)
            for tile in range(work.begin + 1, work.end):
                if CUT.turns:
                    mbarrier.wait(turns.index(ME), turn_phase)
                    turn_phase = turn_phase ^ 1
                k = keys.stages.index(slot).permute([1, 0])
                scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
                mbarrier.wait(values.ready.index(v_slot), v_phase)
                mixed = warpgroup_mma(p, values.stages.index(v_slot), total, is_async=True)
                if CUT.turns:
                    mbarrier.arrive(turns.index((ME + 1) % CUT.warpgroups))
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(keys.free.index(slot))
                scores = _mask(scores, tile * CUT.tile, first, batch.window, CUT)
                weights, best, shrink = _weigh(scores, best, log2_scale)
                weight = weight * shrink + gl.sum(weights, 1)
                read_slot = v_slot
                v_slot = slot
                v_phase = phase
                slot, phase = next_stage(slot, phase, stages)
                # The wait for the next keys stands between the weights and the wait for the values
                # of this tile: ptxas would move that wait to where nothing overlaps, and moves
                # nothing past a loop.
                mbarrier.wait(keys.ready.index(slot), phase, pred=tile + 1 < work.end)
                total, weight = warpgroup_mma_wait(0, deps=(mixed, weight))
                mbarrier.arrive(values.free.index(read_slot))
                total = total * gl.convert_layout(shrink, o_rows)[:, None]
                p = gl.convert_layout(weights.to(q.dtype), p_layout)

            mbarrier.wait(values.ready.index(v_slot), v_phase)
            last_keys = work.seq_len - (work.end - 1) * CUT.tile
            if last_keys < CUT.tile:
                _clear(values, v_slot, gl.maximum(last_keys, 0), CUT)
            mixed = warpgroup_mma(p, values.stages.index(v_slot), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=(mixed,))
            mbarrier.arrive(values.free.index(v_slot))
            # Padding has seen nothing.
            weight = gl.convert_layout(gl.where(weight == 0.0, 1.0, weight), o_rows)
            _store(q, total / weight[:, None], out, out_stride, work, first_token, CUT)
            mbarrier.arrive(queries.free.index(q_slot))
            q_slot, q_phase = next_stage(q_slot, q_phase, query_stages)


@gluon.jit
def _ring(
    dtype: gl.constexpr,
    stages: gl.constexpr,
    tiles: gl.constexpr,  # of a stage
    rows: gl.constexpr,  # of a tile
    CUT: gl.constexpr,
):
    memory: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    places = gl.allocate_shared_memory(dtype, [stages * tiles, rows, CUT.head_dim], memory)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CUT.warpgroups)
    return Ring(places, ready, free)


_SCALARS = ["table_stride", "n_tokens", "n_rows", "n_decode", "n_blocks", "rounds", "window"]


@gluon.jit(do_not_specialize=_SCALARS)
def prefill_hopper_kernel(
    q,  # tiles [wg_tokens, pack, PANEL] of [tokens, query heads, head_dim]
    k,  # tiles [1, box, PANEL] of [blocks, KV heads * page, head_dim]
    v,
    out,
    query_start,
    seq_lens,
    block_tables,
    table_stride,
    n_tokens,
    n_rows,
    n_decode,
    n_blocks,
    rounds,
    window,  # a large number where there is none
    out_stride,
    log2_scale,
    CUT: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    stages: gl.constexpr = CUT.stages
    query_stages: gl.constexpr = CUT.query_stages
    warpgroups: gl.constexpr = CUT.warpgroups
    tile: gl.constexpr = CUT.tile
    queries = _ring(q.dtype, query_stages, warpgroups, ROWS, CUT)
    keys = _ring(q.dtype, stages, 1, tile, CUT)
    values = _ring(q.dtype, stages, 1, tile, CUT)
    turns = gl.allocate_shared_memory(gl.int64, [warpgroups, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(warpgroups):
        mbarrier.init(turns.index(warpgroup), count=1)
    fence_async_shared()
    if PDL:
        gdc_wait()
    batch = Batch(
        query_start,
        seq_lens,
        block_tables,
        table_stride,
        n_tokens,
        n_rows,
        n_decode,
        n_blocks,
        rounds,
        window,
    )
    if CUT.warpgroups == 2:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (queries, keys, values, turns, batch, out, out_stride, log2_scale, 0, CUT),
                ),
                (
                    _attend,
                    (queries, keys, values, turns, batch, out, out_stride, log2_scale, 1, CUT),
                ),
                (load, ((q, k, v), queries, keys, values, batch, CUT)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (queries, keys, values, turns, batch, out, out_stride, log2_scale, 0, CUT),
                ),
                (
                    _attend,
                    (queries, keys, values, turns, batch, out, out_stride, log2_scale, 1, CUT),
                ),
                (
                    _attend,
                    (queries, keys, values, turns, batch, out, out_stride, log2_scale, 2, CUT),
                ),
                (load, ((q, k, v), queries, keys, values, batch, CUT)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
