"""Configurations of a linear layer that are worth a measurement by itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig
from parts.linear_shapes import Linear

_FEW_ROWS: Final = 64
"""Up to here a row's bits are the same for every number of rows."""
_TILES: Final = [(128, 8, 256), (128, 8, 128), (256, 8, 128), (64, 4, 128), (64, 4, 256)]
"""(block_n, warps, block_rows) for more rows."""


def linear_configs(layer: Linear, rows: int) -> list[SkinnyConfig]:
    return list(_few_rows(layer) if rows <= _FEW_ROWS else _more_rows(layer, rows))


def _few_rows(layer: Linear) -> Iterator[SkinnyConfig]:
    for block_n in (64, 128):
        tiles = -(-layer.n // block_n)
        for splits in _splits(layer, tiles, 0.7, 3):
            base = partial(SkinnyConfig, block_n=block_n, splits=splits)
            yield base()
            yield base(programs=2)
            yield base(block_k=64)
            yield base(share=1)
    splits = _splits(layer, -(-layer.n // 64), 0.7, 3)[0]
    plain = partial(SkinnyConfig, tma=False, splits=splits)
    yield plain(prefetch=0)
    yield plain()
    if layer.gated:
        yield plain(block_n=32, share=3)
        yield plain(block_n=16, share=4)
    else:
        yield SkinnyConfig(splits=splits, share=3)


def _more_rows(layer: Linear, rows: int) -> Iterator[SkinnyConfig]:
    for block_n, warps, block_rows in _TILES:
        if block_rows > rows:
            continue
        tiles = -(-layer.n // block_n) * (rows // block_rows)
        base = partial(
            SkinnyConfig, block_n=block_n, block_k=64, warps=warps, block_rows=block_rows
        )
        for splits in _splits(layer, tiles, 0.6, 2):
            yield base(splits=splits, share=1)
            if block_n * block_rows <= 128 * 128:
                yield base(splits=splits, share=2, programs=2)


def _splits(layer: Linear, tiles: int, least: float, most: float) -> list[int]:
    """Those that make between `least` and `most` programs for each multiprocessor."""
    sms = multiprocessors()
    allowed = [s for s in (1, 2, 4, 8) if s <= layer.max_splits and layer.k >= 128 * s]
    return [s for s in allowed if least * sms <= tiles * s <= most * sms] or allowed[-1:]
