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

from pagemesh.kernels.gpu.kernel import gluon_kernel
from pagemesh.kernels.gpu.prefill_hopper_load import (
    PANEL,
    ROWS,
    Batch,
    Place,
    Ring,
    Shared,
    after,
    cut_of,
    load,
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
        key = start + gl.arange(0, CUT.tile, gl.SliceLayout(0, CUT.score_layout))[None, :]
        row = gl.arange(0, ROWS, gl.SliceLayout(1, CUT.score_layout))[:, None]
        position = first + row // CUT.pack
        seen = key <= position
        if CUT.windowed:
            seen = seen & (key > position - window)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(scores, best, log2_scale):
    """Weights exp2(score - best) with the new best, and the factor for weights so far."""
    new_best = gl.maximum(best, gl.max(scores, 1) * log2_scale)
    weights = gl.exp2(scores * log2_scale - new_best[:, None])
    return weights, new_best, gl.exp2(best - new_best)


@gluon.jit
def _operand(weights, dtype: gl.constexpr, CUT: gl.constexpr):
    """As the matrix instruction takes them from registers; each stays where it is."""
    layout: gl.constexpr = gl.DotOperandLayout(0, CUT.mix_layout, 2)
    return gl.convert_layout(weights.to(dtype), layout, assert_trivial=True)


@gluon.jit
def _by_row(factors, CUT: gl.constexpr):
    """A number for each query, for the mixed values."""
    return gl.convert_layout(factors, gl.SliceLayout(1, CUT.mix_layout), assert_trivial=True)[
        :, None
    ]


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
def _store(stage, mixed, batch, work, first, CUT: gl.constexpr):
    """Of the tokens from `first` on; through the queries' place in shared memory, so that
    neighbouring threads write what lies together."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // CUT.head_dim, CUT.head_dim // 8], [4, 1], [1, 0]
    )
    stage.store(mixed.to(stage.dtype))
    rows = stage.load(layout)
    query = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, CUT.head_dim, gl.SliceLayout(0, layout))
    token = first + query // CUT.pack
    head = work.bundle * CUT.pack + query % CUT.pack
    at = token.to(gl.int64) * batch.out_stride + head * CUT.head_dim
    gl.store(batch.out + at[:, None] + dim[None, :], rows, mask=(token < work.row_end)[:, None])
    fence_async_shared()


@gluon.jit
def _score(q, keys, place, CUT: gl.constexpr):
    """Of queries and a tile of keys; on the way when this returns."""
    nothing = gl.full([ROWS, CUT.tile], 0.0, gl.float32, CUT.score_layout)
    k = keys.stages.index(place.slot).permute([1, 0])
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _mix(p, values, place, total):
    """`total` and the values of a tile with weights p; on the way when this returns."""
    return warpgroup_mma(p, values.stages.index(place.slot), total, is_async=True)


@gluon.jit
def _attend_work(q, shared, place, parity, batch, work, first, ME: gl.constexpr, CUT: gl.constexpr):
    """Mixed values and sums of weights of the queries q, the first at position `first`. The values
    of a tile are mixed while the weights of the next are made.

    Also returns where the rings and the turns are then."""
    keys = shared.key_ring
    values = shared.value_ring
    stages: gl.constexpr = CUT.stages
    mbarrier.wait(keys.ready.index(place.slot), place.parity)
    scores = warpgroup_mma_wait(0, deps=(_score(q, keys, place, CUT),))
    mbarrier.arrive(keys.free.index(place.slot))
    scores = _mask(scores, work.begin * CUT.tile, first, batch.window, CUT)
    best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, CUT.score_layout))
    weights, best, shrink = _weigh(scores, best, batch.log2_scale)
    weight = gl.sum(weights, 1)
    p = _operand(weights, q.dtype, CUT)
    total = gl.full([ROWS, CUT.head_dim], 0.0, gl.float32, CUT.mix_layout)
    to_mix = place
    place = after(place, stages)
    mbarrier.wait(keys.ready.index(place.slot), place.parity, pred=work.begin + 1 < work.end)
    for tile in range(work.begin + 1, work.end):
        if CUT.turns:
            mbarrier.wait(shared.turns.index(ME), parity)
            parity = parity ^ 1
        scoring = _score(q, keys, place, CUT)
        mbarrier.wait(values.ready.index(to_mix.slot), to_mix.parity)
        # Waits for nothing, but keeps the compiler from shrinking before the scores are on the way.
        shrink = warpgroup_mma_wait(1, deps=(shrink,))
        mixing = _mix(p, values, to_mix, total * _by_row(shrink, CUT))
        if CUT.turns:
            mbarrier.arrive(shared.turns.index((ME + 1) % CUT.warpgroups))
        scores = warpgroup_mma_wait(1, deps=(scoring,))
        mbarrier.arrive(keys.free.index(place.slot))
        scores = _mask(scores, tile * CUT.tile, first, batch.window, CUT)
        weights, best, shrink = _weigh(scores, best, batch.log2_scale)
        weight = weight * shrink + gl.sum(weights, 1)
        mixed = to_mix
        to_mix = place
        place = after(place, stages)
        # This wait has its place between the weights and the wait for the mixed values: ptxas would
        # move that one to where nothing overlaps, but moves nothing past a loop.
        mbarrier.wait(keys.ready.index(place.slot), place.parity, pred=tile + 1 < work.end)
        total, weight = warpgroup_mma_wait(0, deps=(mixing, weight))
        mbarrier.arrive(values.free.index(mixed.slot))
        p = _operand(weights, q.dtype, CUT)
    mbarrier.wait(values.ready.index(to_mix.slot), to_mix.parity)
    last_keys = work.seq_len - (work.end - 1) * CUT.tile
    if last_keys < CUT.tile:
        _clear(values, to_mix.slot, gl.maximum(last_keys, 0), CUT)
    total = warpgroup_mma_wait(0, deps=(_mix(p, values, to_mix, total * _by_row(shrink, CUT)),))
    mbarrier.arrive(values.free.index(to_mix.slot))
    return total, weight, place, parity


@gluon.jit
def _attend(shared, batch, ME: gl.constexpr, CUT: gl.constexpr):
    """Warpgroup number ME."""
    queries = shared.query_ring
    query_stages: gl.constexpr = CUT.query_stages
    q_place = Place(0, 0)
    place = Place(0, 0)
    # The first warpgroup has the first turn.
    parity = 1 if ME == 0 else 0
    for turn in range(batch.rounds):
        work = work_of(batch, turn, CUT)
        if work.begin < work.end:
            token = work.token + ME * CUT.wg_tokens
            first = token + work.seq_len - work.row_end
            mbarrier.wait(queries.ready.index(q_place.slot), q_place.parity)
            q = queries.stages.index(q_place.slot * CUT.warpgroups + ME)
            total, weight, place, parity = _attend_work(
                q, shared, place, parity, batch, work, first, ME, CUT
            )
            # Padding has seen nothing.
            weight = gl.where(weight == 0.0, 1.0, weight)
            _store(q, total / _by_row(weight, CUT), batch, work, token, CUT)
            mbarrier.arrive(queries.free.index(q_place.slot))
            q_place = after(q_place, query_stages)


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


_SCALARS = ["table_stride", "n_tokens", "n_rows", "n_decode", "window"]


@gluon_kernel(do_not_specialize=_SCALARS)
def prefill_hopper_kernel(
    q,  # boxes [wg_tokens, pack, PANEL] of [tokens, query heads, head_dim]
    k,  # boxes [1, box, PANEL] of [blocks, KV heads * page, head_dim]
    v,
    out,
    query_start,
    seq_lens,
    block_tables,
    counts,
    table_stride,
    n_tokens,
    n_rows,
    n_decode,
    window,
    out_stride,
    log2_scale,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    BUNDLES: gl.constexpr,
    PAGE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
    WINDOWED: gl.constexpr,
    COUNTED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The constants are the fields of `Cut`."""
    CUT: gl.constexpr = cut_of(  # noqa: N806
        GROUP,
        PACK,
        BUNDLES,
        PAGE,
        HEAD_DIM,
        TILE,
        STAGES,
        QUERY_STAGES,
        WARPGROUPS,
        TURNS,
        WINDOWED,
    )
    if PDL:
        gdc_launch_dependents()
    shared = Shared(
        _ring(q.dtype, QUERY_STAGES, WARPGROUPS, ROWS, CUT),
        _ring(q.dtype, STAGES, 1, TILE, CUT),
        _ring(q.dtype, STAGES, 1, TILE, CUT),
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout()),
    )
    for warpgroup in gl.static_range(WARPGROUPS):
        mbarrier.init(shared.turns.index(warpgroup), count=1)
    fence_async_shared()
    if PDL:
        gdc_wait()
    if COUNTED:
        n_rows = gl.load(counts)
        n_decode = gl.load(counts + 1)
    # Every row may end in a block that is not full, and so may the padding behind them.
    n_blocks = (n_tokens - n_decode) // CUT.block_tokens + n_rows - n_decode + 1
    programs = gl.num_programs(0)
    rounds = (n_blocks * BUNDLES + programs - 1) // programs
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
        log2_scale,
        out,
        out_stride,
    )
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (shared, batch, 0, CUT)),
                (_attend, (shared, batch, 1, CUT)),
                (load, ((q, k, v), shared, batch, CUT)),
            ],
            [4, 1],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (shared, batch, 0, CUT)),
                (_attend, (shared, batch, 1, CUT)),
                (_attend, (shared, batch, 2, CUT)),
                (load, ((q, k, v), shared, batch, CUT)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
