"""What a GPU does not serve is refused with a sentence, not computed wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import CacheSettings, ParallelSettings, Settings
from pagemesh.worker_svc.gpu.limits import require_served
from pagemesh.worker_svc.models.config import DecoderConfig


def config(**changes: Any) -> DecoderConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 60,
        "num_hidden_layers": 1,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
    }
    return DecoderConfig.from_dict(raw | changes)


def with_blocks(tokens: int) -> Settings:
    return Settings(cache=CacheSettings(block_size=tokens))


@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_what_is_served(tokens: int, head_dim: int) -> None:
    require_served(with_blocks(tokens), config(head_dim=head_dim))


@pytest.mark.parametrize("tokens", [1, 8, 15, 24, 48, 160, 255])
def test_blocks_that_pages_cannot_be_found_in(tokens: int) -> None:
    with pytest.raises(SettingsError, match=f"--block-size {tokens} .* power of two") as error:
        require_served(with_blocks(tokens), config())
    assert error.value.key == "block_size"


def test_threads_that_nobody_would_use() -> None:
    with pytest.raises(SettingsError, match="--threads 3 has no effect") as error:
        require_served(Settings(parallel=ParallelSettings(threads=3)), config())
    assert error.value.key == "threads"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"head_dim": 32}, "heads of 32 dimensions .* 33 to 256"),
        ({"head_dim": 320}, "heads of 320 dimensions"),
        ({"num_attention_heads": 71, "num_key_value_heads": 1}, "71 query heads .* 32 at most"),
    ],
)
def test_heads_that_no_kernel_is_for(shape: dict[str, int], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        require_served(Settings(), config(**shape))
