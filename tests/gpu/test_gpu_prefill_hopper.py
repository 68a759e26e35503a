"""The prefill attention for Hopper: its source in a model of the hardware, and on a card."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gluon_model import Launcher
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_layout import Batch, Shape, counted, dense_attention, random_batch
from test_gpu_prefill_attention import chunk_of, on

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu import prefill_hopper
from pagemesh.kernels.gpu.kernel import Kernel
from pagemesh.kernels.gpu.prefill_hopper import (
    HopperConfig,
    choose_config,
    fits,
    prefill_attention_hopper,
)
from pagemesh.kernels.gpu.skinny_tma import is_hopper

POISON = 1e4
PROGRAMS = 3
RAGGED = [(1, 1), (9, 9), (3, 40), (0, 0), (17, 64), (33, 133), (1, 31), (70, 200)]
CONFIGS = [
    HopperConfig(),
    HopperConfig(stages=3, query_stages=1, turns=False),
    HopperConfig(tile_tokens=64, stages=4, pack=False),
    HopperConfig(warpgroups=3),
]

on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper card")]


def attend(batch: Batch, *, window: int | None = None, config: HopperConfig | None = None):
    """What the kernel does not write is POISON."""
    out = torch.full_like(batch.q, POISON)
    prefill_attention_hopper(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.inputs,
        scale=batch.shape.scale,
        window=window,
        out=out,
        config=config,
    )
    return out.cpu()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm().clamp_min(1e-9))


# -- in the model ---------------------------------------------------------------------------------


def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's programs run in a model of the card, as if it had PROGRAMS multiprocessors."""
    launched = prefill_hopper.prefill_hopper_kernel
    kernel = Launcher(launched.jit if isinstance(launched, Kernel) else launched)
    monkeypatch.setattr(prefill_hopper, "prefill_hopper_kernel", kernel)
    monkeypatch.setattr(prefill_hopper, "multiprocessors", lambda: PROGRAMS)
    monkeypatch.setattr(prefill_hopper, "pdl", lambda: False)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    model(monkeypatch)


def check(batch: Batch, window: int | None, config: HopperConfig) -> None:
    n_decode = batch.inputs.n_decode
    out = attend(batch, window=window, config=config)
    assert (out[:n_decode] == POISON).all()
    assert relative_error(out[n_decode:], dense_attention(batch, window)[n_decode:]) < 4e-3


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("window", [None, 23])
def test_equals_dense_attention(config, window):
    """Pages smaller than a tile, padding among the rows and behind them, and decode rows."""
    shape = Shape(n_kv_heads=2, group=4, head_dim=64, block_tokens=16)
    rows = [(1, 30), (1, 0), *RAGGED]
    batch = random_batch(shape, rows, n_decode=2, seed=1, padding_tokens=40, dtype=torch.bfloat16)
    check(batch, window, config)


COUNTED = [(1, 30), (1, 0), (4, 4), (70, 150), (0, 0), (2, 20)]


@pytest.mark.usefixtures("modelled")
def test_counts_that_only_the_device_knows():
    shape = Shape(n_kv_heads=2, group=4, head_dim=64, block_tokens=16)
    batch = random_batch(
        shape, COUNTED, n_decode=2, seed=8, padding_tokens=40, dtype=torch.bfloat16
    )
    assert torch.equal(attend(counted(batch)), attend(batch))


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("group", [1, 3, 6, 8])
@pytest.mark.parametrize("block_tokens", [32, 128])
@pytest.mark.parametrize("head_dim", prefill_hopper.HEAD_DIMS)
def test_heads_and_pages(group, block_tokens, head_dim):
    shape = Shape(n_kv_heads=1, group=group, head_dim=head_dim, block_tokens=block_tokens)
    batch = random_batch(shape, [(60, 290), (5, 5)], n_decode=0, seed=2, dtype=torch.float16)
    check(batch, None, choose_config(head_dim))


rows_of_a_batch = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 300)).map(lambda r: (r[0], sum(r))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(
    rows=rows_of_a_batch,
    window=st.none() | st.integers(1, 200),
    config=st.sampled_from(CONFIGS),
    padding_tokens=st.integers(0, 100),
)
def test_any_batch(rows, window, config, padding_tokens):
    shape = Shape(n_kv_heads=1, group=2, head_dim=64, block_tokens=16)
    batch = random_batch(
        shape, rows, n_decode=0, seed=3, padding_tokens=padding_tokens, dtype=torch.bfloat16
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        model(monkeypatch)
        check(batch, window, config)


# -- everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_tokens", "taken"),
    [
        (torch.bfloat16, 128, 16, True),
        (torch.float16, 64, 128, True),
        (torch.float32, 128, 16, False),
        (torch.bfloat16, 80, 16, False),
        (torch.bfloat16, 128, 8, False),
    ],
)
def test_what_fits(monkeypatch, dtype, head_dim, block_tokens, taken):
    monkeypatch.setattr(prefill_hopper, "is_hopper", lambda: True)
    q = torch.zeros(3, 4, head_dim, dtype=dtype)
    cache = torch.zeros(2, 2, block_tokens, head_dim, dtype=dtype)
    assert fits(q, cache, cache, q) is taken
    wide = torch.zeros(3, 6, head_dim, dtype=dtype)
    assert fits(wide[:, :4], cache, cache, q) is taken
    assert not fits(q.transpose(0, 1), cache, cache, q)
    monkeypatch.setattr(prefill_hopper, "is_hopper", lambda: False)
    assert not fits(q, cache, cache, q)


# -- on a card ------------------------------------------------------------------------------------


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("block_tokens", [16, 64, 128])
    @pytest.mark.parametrize("window", [None, 1, 1000])
    @pytest.mark.parametrize("head_dim", prefill_hopper.HEAD_DIMS)
    @pytest.mark.parametrize("group", [1, 3, 4])
    def test_equals_the_reference(self, block_tokens, window, head_dim, group):
        shape = Shape(n_kv_heads=2, group=group, head_dim=head_dim, block_tokens=block_tokens)
        rows = [(1, 700), (1, 3), (2048, 5000), (130, 130), (0, 0), (1000, 1001), (1, 4000)]
        batch = random_batch(
            shape, rows, n_decode=2, seed=4, padding_tokens=70, dtype=torch.bfloat16
        )
        assert (
            relative_error(attend(on("cuda", batch), window=window)[2:], exact(batch, window)[2:])
            < 5e-3
        )

    def test_counts_that_only_the_device_knows(self):
        shape = Shape(n_kv_heads=2, group=4, head_dim=128, block_tokens=16)
        batch = random_batch(
            shape, COUNTED, n_decode=2, seed=8, padding_tokens=40, dtype=torch.bfloat16
        )
        assert torch.equal(attend(on("cuda", counted(batch))), attend(on("cuda", batch)))

    @pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
    @pytest.mark.parametrize("head_dim", prefill_hopper.HEAD_DIMS)
    @pytest.mark.parametrize("window", [None, 300])
    def test_bits_depend_on_the_position_alone(self, head_dim, window, config):
        """Chunks, neighbours and how the work is cut change nothing."""
        shape = Shape(n_kv_heads=2, group=4, head_dim=head_dim, block_tokens=16)
        rows = [(5, 21), (1500, 1500), (300, 301)]
        batch = random_batch(shape, rows, n_decode=0, seed=5, dtype=torch.bfloat16)
        whole = attend(on("cuda", batch), window=window)
        bounds = [0, 1, 130, 777, 1500]
        for first, stop in pairwise(bounds):
            chunk = on("cuda", chunk_of(batch, 1, first, stop))
            out = attend(chunk, window=window, config=config)
            assert torch.equal(out, whole[5 + first : 5 + stop])

    def test_again_and_again(self):
        """A race would show in the bits, sooner or later."""
        shape = Shape(n_kv_heads=8, group=4, head_dim=128, block_tokens=16)
        batch = random_batch(shape, [(1111, 3000)], n_decode=0, seed=6, dtype=torch.bfloat16)
        there = on("cuda", batch)
        first = attend(there)
        assert all(torch.equal(attend(there), first) for _ in range(30))


def exact(batch: Batch, window: int | None) -> torch.Tensor:
    q, k_cache, v_cache = (x.double() for x in (batch.q, batch.k_cache, batch.v_cache))
    there = on("cuda", replace(batch, q=q, k_cache=k_cache, v_cache=v_cache))
    return paged_attention(
        there.q,
        there.k_cache,
        there.v_cache,
        there.inputs,
        scale=batch.shape.scale,
        window=window,
    ).cpu()
