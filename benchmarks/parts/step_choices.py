"""What may be chosen in a decode step, and kernels that are launched so.

A choice is a configuration of a linear layer (by name; None: cuBLAS) or of a kind of kernel, or a
switch: `pdl:KIND` is whether kernels of that kind overlap their start with the end of the one in
front. `skip` leaves kernels out, whose results are then garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from pagemesh.kernels.gpu import (
    activation,
    decode_attention,
    decode_plan,
    embedding,
    norm,
    rope_store,
    skinny,
    skinny_tma,
)
from pagemesh.kernels.gpu import batch as gpu_batch
from pagemesh.kernels.gpu.decode_plan import Heads
from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig
from pagemesh.worker_svc.gpu import decoder
from pagemesh.worker_svc.models.config import DecoderConfig
from parts.linear_choice import present_config
from parts.linear_shapes import Linear, linears_of

Choices = dict[str, Any]
Mode = Literal["launch", "compile"]

DTYPE: Final = torch.bfloat16
KERNELS: Final[dict[str, list[tuple[Any, str]]]] = {
    "attention": [(decode_attention, "_decode_kernel")],
    "norm": [(norm, "_norm_kernel")],
    "rope_store": [(rope_store, "_rope_store_kernel")],
    "skinny": [(skinny, "_skinny_kernel"), (skinny_tma, "skinny_tma_kernel")],
    "silu": [(activation, "_silu_mul_kernel")],
    "plan": [(decode_plan, "match_kernel"), (decode_plan, "group_kernel")],
    "embed": [(embedding, "_embed_kernel")],
    "gather": [(gpu_batch, "_gather")],
}
SWITCHED: Final = ("attention", "norm", "rope_store", "skinny", "silu")
"""Kinds whose overlap is a choice."""


@dataclass(frozen=True)
class Shape:
    config: DecoderConfig

    @property
    def heads(self) -> Heads:
        config = self.config
        return Heads(config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim)

    @property
    def linears(self) -> list[Linear]:
        return linears_of(self.config)

    def present(self, rows: int) -> Choices:
        """What the worker chooses now."""
        config = self.config
        chosen: Choices = {each.name: present_config(each, rows, DTYPE) for each in self.linears}
        chosen["attention"] = decode_attention.choose_config(self.heads, DTYPE, multiprocessors())
        chosen["norm"] = norm.choose_config(config.hidden_size)
        chosen["rope_store"] = rope_store.choose_config(config.head_dim)
        chosen["silu"] = activation.choose_config(config.intermediate_size)
        return chosen | {f"pdl:{kind}": True for kind in SWITCHED}


@dataclass(frozen=True)
class Changed:
    """A kernel that is launched with other constants, only compiled, or left out."""

    kernel: Any
    constants: dict[str, Any]
    mode: Mode
    skipped: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if self.skipped:
            return
        options |= self.constants
        if self.mode == "compile":
            self.kernel.warmup(*arguments, grid=grid, **options)
        else:
            self.kernel[grid](*arguments, **options)


@contextmanager
def applied(
    shape: Shape, choices: Choices, skip: frozenset[str] = frozenset(), mode: Mode = "launch"
) -> Iterator[None]:
    """Decoders that launch within the block do as chosen."""
    patches = list(_patches(shape, choices, skip, mode))
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(patch.object(module, name, value))
        yield


def _patches(
    shape: Shape, choices: Choices, skip: frozenset[str], mode: Mode
) -> Iterator[tuple[Any, str, Any]]:
    """(module, name in it, what it is to be)."""
    for kind, places in KERNELS.items():
        for module, name in places:
            constants = _constants(kind, choices)
            yield module, name, Changed(getattr(module, name), constants, mode, kind in skip)
    for kind, module in _CONFIGURED.items():
        yield module, "choose_config", lambda *_, kind=kind: choices[kind]
    names = {(each.n, each.k): each.name for each in shape.linears}
    yield decoder, "choose_config", lambda _, n, k, *rest: choices[names[n, k]]
    yield decoder, "choose_gated_config", lambda *_: choices["gate_up"]
    yield skinny, "choose_config", lambda *_, max_splits: choices["head"]
    for name in ("skinny_linear", "skinny_gate_up", "linear"):
        yield decoder, name, _skippable(getattr(decoder, name), names, skip)


_CONFIGURED: Final = {
    "attention": decode_attention,
    "norm": norm,
    "rope_store": rope_store,
    "silu": activation,
}


def _constants(kind: str, choices: Choices) -> dict[str, Any]:
    overlaps = choices.get(f"pdl:{kind}", True)
    return {} if overlaps else {"PDL": False, "launch_pdl": False}


def _skippable(
    run: Callable[..., Tensor], names: dict[tuple[int, int], str], skip: frozenset[str]
) -> Callable[..., Tensor]:
    """Left out, a layer returns memory as it is, of the shape that its reader expects."""

    def run_or_skip(x: Tensor, w: Tensor, *rest: Any, **options: Any) -> Tensor:
        if names[w.shape[0], w.shape[1]] not in skip:
            return run(x, w, *rest, **options)
        out: Tensor | None = options.get("out")
        if out is not None:
            return out
        config: SkinnyConfig | None = options.get("config")
        if config is None:
            return x.new_empty(len(x), len(w))
        gated = run.__name__ == "skinny_gate_up"
        features = len(w) // 2 if gated else len(w)
        if config.splits == 1:
            return x.new_empty(len(x), features)
        return x.new_empty(config.splits, len(x), features, dtype=torch.float32)

    return run_or_skip
