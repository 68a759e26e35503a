"""A decode step with other choices, or without some kernels, as whole steps are tuned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts import decode_step, step_choices
from parts.decode_step import DecodeStep
from parts.model_shapes import SHAPES
from parts.step_choices import SWITCHED, Choices, Shape

from pagemesh.kernels.gpu.skinny_config import SkinnyConfig
from pagemesh.worker_svc.models.config import DecoderConfig

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
ROWS = 3


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype) -> DecodeStep:
    for module in (decode_step, step_choices):
        monkeypatch.setattr(module, "DTYPE", dtype)
    monkeypatch.setattr(decode_step, "MAX_MODEL_LEN", 64)
    torch.manual_seed(1)
    shape = Shape(DecoderConfig.from_dict(SHAPES["qwen3-0.6b"] | SMALL))
    return DecodeStep.random(shape, ROWS, 20, torch.device(device))


def logits(step: DecodeStep, choices: Choices, *skip: str) -> torch.Tensor:
    step.logits.fill_(torch.nan)
    step.launch(ROWS, choices, frozenset(skip))
    return step.logits.float().clone()


def changes() -> list[Choices]:
    own = SkinnyConfig(block_n=16, block_k=32, tma=False, block_rows=16)
    split = SkinnyConfig(block_n=16, block_k=32, tma=False, block_rows=16, splits=2)
    layers = {"qkv": split, "o": split, "down": split, "gate_up": own, "head": own}
    return [{f"pdl:{kind}": False for kind in SWITCHED}, layers]


@pytest.mark.parametrize("change", changes(), ids=lambda change: next(iter(change)))
def test_choices_change_no_logits(step: DecodeStep, change: Choices) -> None:
    present = step.shape.present(ROWS)
    expected = logits(step, present)
    assert float(expected.std()) > 0.1
    got = logits(step, present | change)
    assert float((got - expected).norm() / expected.norm()) < 0.03


def test_what_is_left_out_is_missed(step: DecodeStep) -> None:
    present = step.shape.present(ROWS)
    expected = logits(step, present)
    assert torch.isnan(logits(step, present, "head")).all()
    assert torch.equal(logits(step, present), expected)
    step.buffers.token_ids[:] = (step.buffers.token_ids + 1) % 100
    assert not torch.equal(logits(step, present, "gather"), expected)
    assert torch.equal(logits(step, present), expected)
