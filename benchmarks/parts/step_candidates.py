"""Alternatives to one choice of a decode step: those that differ in little from the present."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from pagemesh.kernels.gpu.activation import ActivationConfig
from pagemesh.kernels.gpu.decode_plan import DecodeConfig
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.norm import NormConfig
from pagemesh.kernels.gpu.rope_store import RopeStoreConfig
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig
from parts.decode_fit import SHARED_BYTES, fits
from parts.linear_shapes import Linear
from parts.step_choices import DTYPE, SWITCHED, Choices, Shape

_FEW_ROWS: Final = 64
_BLOCKS: Final = [(64, 4), (128, 4), (128, 8), (256, 4), (256, 8)]
_RESIDENT: Final = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)]
"""(share, programs) of SkinnyConfig."""


@dataclass(frozen=True)
class Space:
    """`any_order`: up to 64 rows, too, the order of sums may change."""

    shape: Shape
    rows: int
    any_order: bool = False

    def names(self, choices: Choices) -> list[str]:
        """What there is to choose: what is believed to matter most comes first."""
        unused = {"silu", "pdl:silu"} if choices["gate_up"] is not None else set()
        switches = [f"pdl:{kind}" for kind in SWITCHED]
        linears = ["gate_up", "down", "qkv", "o", "head"]
        names = [*switches, *linears, "attention", "norm", "rope_store", "silu"]
        return [name for name in names if name not in unused]

    def alternatives(self, name: str, choices: Choices) -> list[Any]:
        """Other values than the present one."""
        return [
            value for value in dict.fromkeys(self._values(name, choices)) if value != choices[name]
        ]

    def _values(self, name: str, choices: Choices) -> Iterable[Any]:
        match name.partition(":")[0]:
            case "pdl":
                return [False, True]
            case "attention":
                return attention_configs(choices[name], self.shape.config.head_dim)
            case "norm":
                return [NormConfig(num_warps=n) for n in (2, 4, 8, 16)]
            case "rope_store":
                return rope_store_configs()
            case "silu":
                return silu_configs()
        [layer] = [each for each in self.shape.linears if each.name == name]
        return self._linear_configs(layer, choices[name])

    def _linear_configs(
        self, layer: Linear, present: SkinnyConfig | None
    ) -> Iterator[SkinnyConfig | None]:
        keeps_order = self.rows <= _FEW_ROWS and not self.any_order
        if not keeps_order:
            yield None
        base = present or _start(layer, self.rows)
        for config in _near(base, self.rows):
            if _sensible(config, layer, self.rows) and not (
                keeps_order and config.order != base.order
            ):
                yield config


def _start(layer: Linear, rows: int) -> SkinnyConfig:
    """Where to look around while cuBLAS is the choice."""
    wide = rows > _FEW_ROWS
    block_n, warps = (128, 8) if layer.n >= 128 * multiprocessors() else (64, 4)
    return SkinnyConfig(
        block_n=block_n,
        block_k=64 if wide else 128,
        warps=warps,
        block_rows=128 if wide else 64,
        share=1,
    )


def _near(base: SkinnyConfig, rows: int) -> Iterator[SkinnyConfig]:
    for share, programs in _RESIDENT:
        yield replace(base, share=share, programs=programs)
    for shaped in dict.fromkeys(_near_shapes(base, rows)):
        for share, programs in _RESIDENT[::2]:
            yield replace(shaped, share=share, programs=programs)
    for prefetch in (0, 4):
        yield replace(base, tma=False, prefetch=prefetch)


def _near_shapes(base: SkinnyConfig, rows: int) -> Iterator[SkinnyConfig]:
    most = 1 << (rows - 1).bit_length()
    for block_n, warps in _BLOCKS:
        wider = replace(base, block_n=block_n, warps=warps)
        yield wider
        # As many programs as before.
        if block_n != base.block_n:
            yield replace(wider, splits=max(1, base.splits * block_n // base.block_n))
    for block_k in (64, 128):
        yield replace(base, block_k=block_k)
    for splits in (1, 2, 4, 8):
        yield replace(base, splits=splits)
    for block_rows in (64, 128, 256):
        if rows > _FEW_ROWS and block_rows <= most:
            yield replace(base, block_rows=block_rows)
            yield replace(base, block_rows=block_rows, block_n=128, warps=8)


def _sensible(config: SkinnyConfig, layer: Linear, rows: int) -> bool:
    block_rows = config.rows_tile(rows)
    stage_bytes = (config.block_n + block_rows) * config.block_k * DTYPE.itemsize
    programs = (
        -(-layer.n // config.block_n) * -(-rows // block_rows) * config.splits / multiprocessors()
    )
    whole = layer.name in ("gate_up", "head")
    return (
        config.splits in ((1,) if whole else (1, 2, 4, 8))
        and layer.k >= 128 * config.splits
        and (not config.tma or config.block_n % (16 * config.warps) == 0)
        # Sums that a thread holds.
        and config.block_n * block_rows <= 128 * 32 * config.warps
        and 2 * stage_bytes + 18 * 1024 <= SHARED_BYTES // config.share
        and programs >= 0.45
        and (programs <= 6 or config.splits == 1)
    )


def attention_configs(present: DecodeConfig, head_dim: int) -> Iterator[DecodeConfig]:
    """One field changed, or one beside the number of programs."""
    changes: list[dict[str, Any]] = [{}]
    changes += [{"tile_tokens": n} for n in (16, 32, 64)]
    changes += [{"num_warps": n} for n in (2, 4)]
    changes += [{"num_stages": n} for n in (2, 3, 4, 5)]
    for change in changes:
        for programs in (2, 3, 4, 5, 6):
            config = replace(present, **change, programs_per_sm=programs)
            if fits(config, head_dim, DTYPE, least_bytes=64 * 1024, least_warps=6):
                yield config
    for chunk_tokens in (128, 256, 512, 1024):
        yield replace(present, chunk_tokens=chunk_tokens)


def rope_store_configs() -> Iterator[RopeStoreConfig]:
    for heads in (2, 4, 8, 16):
        for num_warps in (1, 2, 4):
            yield RopeStoreConfig(heads=heads, num_warps=num_warps)


def silu_configs() -> Iterator[ActivationConfig]:
    for block in (512, 1024, 2048):
        for num_warps in (2, 4, 8):
            yield ActivationConfig(block=block, num_warps=num_warps)
