"""The gated activation of the Llama family's MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up, for gate_up [T, 2 * I] holding gate then up; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
