"""The linear layers for few rows against torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.gpu.skinny import skinny_gate_up, skinny_linear
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig, choose_config, choose_gated_config
from pagemesh.kernels.linear import join_splits

ON_CARD = torch.cuda.is_available()
SMALL = SkinnyConfig(block_n=16, block_k=32)
# (rows, N, K) of which none, all, or all but the rows fill their tiles.
SHAPES = [(1, 24, 48), (3, 40, 80), (16, 32, 64), (17, 32, 128)]
# One layer of Qwen3-0.6B and of Llama-3.1-8B, and a vocabulary.
LARGE = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (151936, 1024)]


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if expected.dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_products_equal_torchs(
    shape: tuple[int, int, int], splits: int, dtype: torch.dtype, device: str
) -> None:
    rows, n, k = shape
    x = random(rows, k, dtype=dtype, device=device)
    w = random(n, k, dtype=dtype, device=device)
    out = skinny_linear(x, w, config=SkinnyConfig(block_n=16, block_k=32, splits=splits))
    if splits > 1:
        assert out.shape == (splits, rows, n)
        assert out.dtype == torch.float32
    else:
        assert out.dtype == dtype
    assert_close(join_splits(out, dtype), linear(x, w))


def test_bias_is_added_where_sums_are_whole(dtype: torch.dtype, device: str) -> None:
    x = random(3, 64, dtype=dtype, device=device)
    w = random(24, 64, dtype=dtype, device=device)
    bias = random(24, dtype=dtype, device=device)
    assert_close(skinny_linear(x, w, bias, config=SMALL), linear(x, w, bias))
    with pytest.raises(ValueError, match="split"):
        skinny_linear(x, w, bias, config=SkinnyConfig(splits=2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_and_up_meet(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    rows, inner, k = shape
    x = random(rows, k, dtype=dtype, device=device)
    w = random(2 * inner, k, dtype=dtype, device=device) / k**0.5
    assert_close(skinny_gate_up(x, w, config=SMALL), silu_mul(linear(x, w)))
    with pytest.raises(ValueError, match="split"):
        skinny_gate_up(x, w, config=SkinnyConfig(splits=2))


def test_rows_may_be_apart_and_none(device: str) -> None:
    x = random(5, 96, dtype=torch.float32, device=device)
    w = random(32, 64, dtype=torch.float32, device=device)
    assert_close(skinny_linear(x[:, :64], w, config=SMALL), linear(x[:, :64], w))
    assert skinny_linear(x[:0, :64], w, config=SMALL).shape == (0, 32)
    assert skinny_gate_up(x[:0, :64], w, config=SMALL).shape == (0, 16)


def test_a_row_does_not_see_the_others(dtype: torch.dtype, device: str) -> None:
    x = random(17, 64, dtype=dtype, device=device)
    x[1:] = torch.nan
    w = random(32, 64, dtype=dtype, device=device)
    together = skinny_linear(x, w, config=SMALL)
    assert torch.equal(together[:1], skinny_linear(x[:1], w, config=SMALL))
    together = skinny_gate_up(x, w, config=SMALL)
    assert torch.equal(together[:1], skinny_gate_up(x[:1], w, config=SMALL))


@pytest.mark.parametrize(("n", "k"), [*LARGE, (576, 576), (128256, 4096), (28672, 4096)], ids=str)
def test_one_order_of_sums_serves_1_to_64_rows(n: int, k: int) -> None:
    choices = [choose_config(rows, n, k, torch.bfloat16, 132) for rows in range(1, 65)]
    choices += [choose_gated_config(rows, n // 2, k, torch.bfloat16, 132) for rows in range(1, 65)]
    orders = [config.order for config in choices if config is not None]
    assert len(orders) == 128
    assert len(set(orders[:64])) == 1
    assert len(set(orders[64:])) == 1
    assert choose_config(1, n, k, torch.float32, 132) is None


@pytest.mark.parametrize("max_splits", [1, 2])
def test_splits_are_bounded(max_splits: int) -> None:
    config = choose_config(64, 1024, 3072, torch.bfloat16, 132, max_splits=max_splits)
    assert config is not None
    assert config.splits == max_splits


def test_gated_layers_are_never_split() -> None:
    config = choose_gated_config(64, 3072, 1024, torch.bfloat16, 132)
    assert config is not None
    assert config.splits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 200, 192), (33, 1000, 1096)], ids=str)
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("block_rows", [16, 64])
def test_both_ways_to_load_give_the_same_bits(
    shape: tuple[int, int, int], block_n: int, splits: int, block_rows: int, device: str
) -> None:
    rows, n, k = shape
    x = random(rows, k, dtype=torch.bfloat16, device=device)
    w = random(n, k, dtype=torch.bfloat16, device=device)
    bias = random(n, dtype=torch.bfloat16, device=device) if splits == 1 else None
    config = SkinnyConfig(block_n=block_n, splits=splits, block_rows=block_rows)
    plain = replace(config, tma=False)
    out = skinny_linear(x, w, bias, config=config)
    assert torch.equal(out, skinny_linear(x, w, bias, config=plain))
    assert_close(join_splits(out, x.dtype), linear(x, w, bias))
    if splits == 1:
        gated = skinny_gate_up(x, w, config=config)
        assert torch.equal(gated, skinny_gate_up(x, w, config=plain))
        assert_close(gated, silu_mul(linear(x, w)))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), LARGE, ids=str)
def test_bits_do_not_depend_on_the_number_of_rows(n: int, k: int, device: str) -> None:
    x = random(64, k, dtype=torch.bfloat16, device=device)
    w = random(n, k, dtype=torch.bfloat16, device=device)
    sms = torch.cuda.get_device_properties().multi_processor_count
    config = choose_config(64, n, k, x.dtype, sms)
    assert config is not None
    whole = skinny_linear(x, w, config=config)
    assert_close(join_splits(whole, x.dtype), linear(x, w))
    for rows in (1, 3, 16, 17, 33):
        own_choice = choose_config(rows, n, k, x.dtype, sms)
        for choice in (config, own_choice):
            part = skinny_linear(x[:rows], w, config=choice)
            assert torch.equal(part, whole[..., :rows, :])


@pytest.mark.gpu
@pytest.mark.parametrize(("inner", "k"), [(3072, 1024), (14336, 4096)], ids=str)
def test_gated_bits_do_not_depend_on_the_number_of_rows(inner: int, k: int, device: str) -> None:
    x = random(64, k, dtype=torch.bfloat16, device=device)
    w = random(2 * inner, k, dtype=torch.bfloat16, device=device) / k**0.5
    whole = skinny_gate_up(x, w)
    assert_close(whole, silu_mul(linear(x, w)))
    for rows in (1, 3, 16, 17, 33):
        assert torch.equal(skinny_gate_up(x[:rows], w), whole[:rows])
