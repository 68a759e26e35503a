"""The memory plan: how many KV blocks there are and how long a request may be. Pure arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import MaxModelLen

GIB: Final = 2**30
CPU_SHARE: Final = 0.25
CPU_LIMIT_BYTES: Final = GIB
CPU_NUM_SEQS: Final = 256
CPU_BUDGET_TOKENS: Final = 512
GPU_NUM_SEQS: Final = 512
GPU_BUDGET_TOKENS: Final = 8192
NULL_BLOCKS: Final = 1

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_CGROUP: Final = Path("/sys/fs/cgroup")
_SHORTAGES: Final = ("allocate", "out of memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`num_blocks` counts the null block; `fitting_requests` of full length fit at once."""

    kv_bytes_per_token: int
    block_tokens: int
    num_blocks: int
    max_model_len: int

    @property
    def kv_tokens(self) -> int:
        return (self.num_blocks - NULL_BLOCKS) * self.block_tokens

    @property
    def kv_pool_bytes(self) -> int:
        return self.num_blocks * self.block_tokens * self.kv_bytes_per_token

    @property
    def fitting_requests(self) -> int:
        blocks_each = blocks_for(self.max_model_len, self.block_tokens)
        return (self.num_blocks - NULL_BLOCKS) // blocks_each


def plan_memory(
    *,
    kv_bytes_per_token: int,
    block_tokens: int,
    pool_bytes: int,
    model_max_tokens: int,
    max_model_len: MaxModelLen,
    max_num_seqs: int,
) -> MemoryPlan:
    """Divide `pool_bytes`. No more blocks than `max_num_seqs` requests of full length can use.

    Raises StartupError when `max_model_len` is beyond the model or the pool.
    """
    longest = longest_tokens(max_model_len, model_max_tokens)
    block_bytes = kv_bytes_per_token * block_tokens
    usable = max_num_seqs * blocks_for(longest, block_tokens)
    num_blocks = min(pool_bytes // block_bytes, usable + NULL_BLOCKS)
    fitting_tokens = max(0, num_blocks - NULL_BLOCKS) * block_tokens
    if fitting_tokens < (1 if max_model_len == "auto" else longest):
        wanted_tokens = block_tokens if max_model_len == "auto" else longest
        raise _too_small(wanted_tokens, fitting_tokens, pool_bytes, block_bytes, block_tokens)
    return MemoryPlan(
        kv_bytes_per_token=kv_bytes_per_token,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_model_len=min(longest, fitting_tokens),
    )


def longest_tokens(max_model_len: MaxModelLen, model_max_tokens: int) -> int:
    """How long a request may be, if the pool allows. Raises SettingsError."""
    if max_model_len == "auto":
        return model_max_tokens
    if not 1 <= max_model_len <= model_max_tokens:
        raise SettingsError(
            f"--max-model-len {max_model_len} is outside what the model can do: "
            f"choose 1 to {model_max_tokens}",
            key="max_model_len",
        )
    return max_model_len


def _too_small(
    wanted_tokens: int, fitting_tokens: int, pool_bytes: int, block_bytes: int, block_tokens: int
) -> StartupError:
    needed = (blocks_for(wanted_tokens, block_tokens) + NULL_BLOCKS) * block_bytes
    shorter = f" or --max-model-len {fitting_tokens}" if fitting_tokens else ""
    return StartupError(
        f"a request of {wanted_tokens} tokens does not fit the KV pool of "
        f"{show_bytes(pool_bytes)}, which holds {fitting_tokens} tokens: "
        f"set --kv-cache-memory {needed}{shorter}"
    )


def plan_figures(plan: MemoryPlan) -> dict[str, int]:
    """Of the KV pool, for the log."""
    return {
        "kv_pool_bytes": plan.kv_pool_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_blocks": plan.num_blocks,
        "kv_tokens": plan.kv_tokens,
        "max_model_len": plan.max_model_len,
        "fitting_requests": plan.fitting_requests,
    }


def pool_line(plan: MemoryPlan, model_max_tokens: int) -> str:
    """The KV pool in the numbers of a start."""
    lowered = plan.max_model_len == plan.kv_tokens < model_max_tokens
    return (
        f"{show_bytes(plan.kv_pool_bytes)}: {plan.num_blocks:,} blocks, {plan.kv_tokens:,} tokens, "
        f"{plan.fitting_requests:,} request{'s' * (plan.fitting_requests > 1)} of "
        f"{plan.max_model_len:,} tokens"
        f"{f' (the model: {model_max_tokens:,})' * lowered}"
    )


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def pool_bytes_on_cpu(
    kv_cache_memory: str | None, available_bytes: int, *, n_workers: int = 1
) -> int:
    """Size of the KV pool of each of `n_workers` on a CPU. Raises SettingsError when it is more
    than is available."""
    if kv_cache_memory is None:
        return min(int(CPU_SHARE * available_bytes) // n_workers, CPU_LIMIT_BYTES)
    wanted = parse_bytes(kv_cache_memory)
    if wanted > available_bytes:
        raise SettingsError(
            f"--kv-cache-memory {kv_cache_memory} is more than the {show_bytes(available_bytes)} "
            "of memory available beside the weights: choose less or free memory",
            key="kv_cache_memory",
        )
    return wanted


def parse_bytes(text: str) -> int:
    """Bytes in `text`: 512MiB, 2GiB, 1.5GB, 1e9, 1048576. Raises SettingsError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    unit = _UNITS.get(match[2]) if match else None
    try:
        if match is None or unit is None:
            raise ValueError
        return int(float(match[1]) * unit)
    except (ValueError, OverflowError):
        raise SettingsError(
            f"--kv-cache-memory {text!r} is no size: write bytes, or a number with KiB, MiB, GiB, "
            "KB, MB or GB",
            key="kv_cache_memory",
        ) from None


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    return min([psutil.virtual_memory().available, *_cgroup_room(cgroup)])


def _cgroup_room(folder: Path) -> list[int]:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        return [] if limit == "max" else [max(0, int(limit) - used)]
    except (OSError, ValueError):
        return []


def budget_tokens(
    max_num_batched_tokens: int | None,
    *,
    default_tokens: int = CPU_BUDGET_TOKENS,
    chunked_prefill: bool,
    max_model_len: int,
) -> int:
    """The token budget of a step.

    Raises SettingsError when prompts must not be split but need not fit one step.
    """
    budget = default_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    if not chunked_prefill and budget < max_model_len:
        raise SettingsError(
            f"without chunked prefill the budget of {budget} tokens must hold a whole prompt: set "
            f"--max-num-batched-tokens {max_model_len}, or lower --max-model-len",
            key="max_num_batched_tokens",
        )
    return budget


def show_bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch's CPU allocator, CUDA and its libraries, and Triton say
    so with plain RuntimeErrors."""
    kinds, text = (MemoryError, torch.OutOfMemoryError), str(error)
    return isinstance(error, kinds) or any(word in text for word in _SHORTAGES)
