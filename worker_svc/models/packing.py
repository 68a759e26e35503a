"""A decoder's weights as the CPU's kernels read them: packed matrices in one array, everything
else (norms, biases, scales) in another."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.cpu.memory import zeros
from pagemesh.kernels.cpu.program import Weights
from pagemesh.kernels.cpu.tile import PANEL, inputs_at_once, pack, panel_elements

# How kernels see each dtype: numpy has no bfloat16, numba no float16, so both travel as bits.
_BITS: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
}
NOWHERE: Final = -1
_INT8_MOST: Final = 127
# Elements that are float32 at once: 64 MiB.
_QUANTIZED_AT_ONCE: Final = 2**24


class Matrix(NamedTuple):
    """Where a packed matrix [n, k] lies: its first element, those of a panel, and the places of its
    scales and biases in the constants (NOWHERE: none)."""

    weight: int
    scale: int
    bias: int
    n: int
    k: int
    panel_elements: int


def as_bits(tensor: Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as an array that kernels take (see simd)."""
    bits = _BITS[tensor.dtype]
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)
    array: NDArray[Any] = tensor.numpy().view(bits)
    return array


class Packer:
    """Fills the two arrays. `elements` is how many weights the packed matrices have at most, with
    padding; memory is taken as it is written, so each tensor may be freed once it is packed."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._matrices = zeros(elements, _BITS[dtype])
        self._used = 0
        self._constants: list[NDArray[np.float32]] = []
        self._n_constants = 0

    @staticmethod
    def elements(shape: tuple[int, int], dtype: torch.dtype) -> int:
        """What a matrix [n, k] takes."""
        n, k = shape
        return -(-n // PANEL) * panel_elements(k, _BITS[dtype])

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        return self._add([weight], [bias])

    def gated(self, gate_up: Tensor, bias: Tensor | None) -> Matrix:
        """[2 * n, k], gate above up: their panels are packed in turn."""
        biases = [None, None] if bias is None else list(bias.chunk(2))
        return self._add(list(gate_up.chunk(2)), biases)

    def constant(self, *values: Tensor) -> int:
        """The place of the values, one after another, as float32."""
        return self._place(np.concatenate([value.float().numpy().ravel() for value in values]))

    def weights(self) -> Weights:
        constants = self._constants or [np.zeros(0, np.float32)]
        return Weights(self._matrices[: self._used], np.concatenate(constants))

    @property
    def inputs_at_once(self) -> int:
        return inputs_at_once(_BITS[self._dtype])

    def _add(self, parts: list[Tensor], biases: list[Any]) -> Matrix:
        n, k = parts[0].shape
        stored, scales = zip(*map(self._stored, parts), strict=True)
        per_panel = panel_elements(k, _BITS[self._dtype])
        first, n_panels = self._used, -(-n // PANEL)
        self._used += n_panels * len(parts) * per_panel
        panels = self._matrices[first : self._used].reshape(n_panels, len(parts), per_panel)
        for index, part in enumerate(stored):
            pack(part, panels[:, index])
        return Matrix(first, self._by_panel(scales), self._by_panel(biases), n, k, per_panel)

    def _stored(self, part: Tensor) -> tuple[NDArray[Any], Tensor | None]:
        if self._dtype is not torch.int8:
            return as_bits(part.to(self._dtype)), None
        values, scale = quantize_rows(part)
        return as_bits(values), scale

    def _by_panel(self, vectors: Any) -> int:
        """Vectors [n] of each part in the order of the packed rows."""
        if vectors[0] is None:
            return NOWHERE
        padded = -(-len(vectors[0]) // PANEL) * PANEL
        filled = np.zeros((len(vectors), padded), np.float32)
        for row, vector in zip(filled, vectors, strict=True):
            row[: len(vector)] = vector.float().numpy()
        return self._place(filled.reshape(len(vectors), -1, PANEL).transpose(1, 0, 2).ravel())

    def _place(self, values: NDArray[np.float32]) -> int:
        first = self._n_constants
        self._constants.append(values)
        self._n_constants += len(values)
        return first


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [n, k] and a float32 scale for each row, so that row i is about scale[i] * int8[i].

    Symmetric, by the largest magnitude of each row; a row of zeros has scale 0.
    """
    scale = weight.abs().amax(dim=1).float() / _INT8_MOST
    values = torch.empty(weight.shape, dtype=torch.int8)
    step = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        divisor = scale[part].clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        values[part] = (weight[part].float() / divisor).round_()
    return values, scale
