"""What the GPU's kernels cannot compute, or would compute wrongly: refused at the start."""

from __future__ import annotations

from typing import Final

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.models.config import DecoderConfig

_SMALLEST_BLOCK: Final = 16
# The configurations of both attention kernels are for heads padded to 64, 128 and 256.
_HEAD_DIMS: Final = range(33, 257)
# A program of the prefill attention takes at least this many queries of one token.
_MOST_GROUPED: Final = 32


def require_served(settings: Settings, config: DecoderConfig) -> None:
    """Raises SettingsError or StartupError with the sentence to show."""
    block = settings.cache.block_size
    if block < _SMALLEST_BLOCK or block & (block - 1):
        raise SettingsError(
            f"--block-size {block} is not supported on a GPU: use a power of two from "
            f"{_SMALLEST_BLOCK} on, or --device cpu",
            key="block_size",
        )
    if settings.parallel.threads is not None:
        raise SettingsError(
            f"--threads {settings.parallel.threads} has no effect on a GPU: leave it out, or use "
            "--device cpu",
            key="threads",
        )
    group = config.n_heads // config.n_kv_heads
    if config.head_dim not in _HEAD_DIMS:
        raise _unserved(
            f"heads of {config.head_dim} dimensions",
            f"those of {_HEAD_DIMS.start} to {_HEAD_DIMS.stop - 1}",
        )
    if group > _MOST_GROUPED:
        raise _unserved(f"{group} query heads to each KV head", f"{_MOST_GROUPED} at most")


def _unserved(what: str, served: str) -> StartupError:
    return StartupError(
        f"config.json: {what} are not supported on a GPU, whose kernels serve {served}: use "
        "--device cpu"
    )
