"""From a decoder to the list of operations that the CPU's kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pagemesh.kernels.cpu import matmul, program
from pagemesh.kernels.cpu.program import OP, Weights
from pagemesh.kernels.cpu.tile import PANEL
from pagemesh.worker_svc.layers.linear import FusedLinear
from pagemesh.worker_svc.layers.norm import RMSNorm
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder, DecoderLayer
from pagemesh.worker_svc.models.packing import NOWHERE, Matrix, Packer


class Region(NamedTuple):
    """A buffer between operations: rows of `width` float32, after `column` of them in all buffers
    before it. With room for n rows it begins at element n * column."""

    column: int
    width: int


class Plan(NamedTuple):
    """`body` gives the hidden states in `final`, `head` the logits of those in `picked`. In both
    lists `x` and `out` are columns, see `placed`."""

    body: NDArray[np.void]
    head: NDArray[np.void]
    final: Region
    picked: Region
    row_elements: int
    """float32 that all buffers together take for a row."""
    inputs_at_once: int


def placed(ops: NDArray[np.void], rows: int) -> NDArray[np.void]:
    """The operations for buffers with room for `rows` rows."""
    ops = ops.copy()
    ops["x"] *= rows
    ops["out"] *= rows
    return ops


def plan_of(decoder: Decoder, dtype: torch.dtype) -> tuple[Plan, Weights]:
    """The program and its weights, kept as `dtype`. Empties the decoder's tensors on the way."""
    builder = _Builder(decoder.config, Packer(_matrix_elements(decoder, dtype), dtype))
    return builder.build(decoder)


def _matrix_elements(decoder: Decoder, dtype: torch.dtype) -> int:
    """Elements of all packed matrices; gate and up are padded each, hence one panel more."""
    shapes = [tuple(weight.shape) for weight in decoder.parameters() if weight.dim() == 2]
    return sum(Packer.elements((n + PANEL, k), dtype) for n, k in shapes)


class _Builder:
    def __init__(self, config: DecoderConfig, packer: Packer) -> None:
        self._config = config
        self._packer = packer
        self._row_elements = 0
        heads = config.n_heads + 2 * config.n_kv_heads
        self._residual = self._region(config.hidden_size)
        self._normed = self._region(config.hidden_size)
        self._qkv = self._region(heads * config.head_dim)
        self._mixed = self._region(config.n_heads * config.head_dim)
        self._inner = self._region(config.intermediate_size)
        self._picked = self._region(config.hidden_size)
        self._angles = self._region(config.head_dim)

    def build(self, decoder: Decoder) -> tuple[Plan, Weights]:
        embedding = self._packer.matrix(decoder.embedding, None)
        head = embedding
        if decoder.head is not decoder.embedding:
            head = self._packer.matrix(decoder.head, None)
            _release(decoder.head)
        _release(decoder.embedding)
        body = [
            _op(program.EMBED, out=self._residual, weight=embedding.weight, scale=embedding.scale)
        ]
        frequencies = self._packer.constant(decoder.rotary.inv_freq)
        body.append(_op(program.ANGLES, out=self._angles, weight=frequencies))
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            body.extend(self._layer(index, layer))
        body.append(self._norm(decoder.norm))
        logits = Region(0, head.n)
        plan = Plan(
            body=np.concatenate(body),
            head=_matmul(self._picked, logits, head, matmul.STORE, to_logits=1),
            final=self._normed,
            picked=self._picked,
            row_elements=self._row_elements,
            inputs_at_once=self._packer.inputs_at_once,
        )
        return plan, self._packer.weights()

    def _region(self, width: int) -> Region:
        """Padded to whole panels; the padding stays zero, so that reading it does no harm."""
        region = Region(self._row_elements, -(-width // PANEL) * PANEL)
        self._row_elements += region.width
        return region

    def _layer(self, index: int, layer: DecoderLayer) -> Iterator[NDArray[np.void]]:
        attention, mlp = layer.attention, layer.mlp
        yield self._norm(layer.attention_norm)
        yield self._linear(attention.qkv, self._normed, self._qkv, matmul.STORE)
        norms = NOWHERE
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = self._packer.constant(attention.q_norm.weight, attention.k_norm.weight)
        yield _op(program.ROTATE, x=self._qkv, out=self._angles, weight=norms, layer=index)
        window = attention.window or 0
        yield _op(program.ATTEND, x=self._qkv, out=self._mixed, layer=index, window=window)
        yield self._linear(attention.output, self._mixed, self._residual, matmul.ADD)
        yield self._norm(layer.mlp_norm)
        yield self._linear(mlp.gate_up, self._normed, self._inner, matmul.GATED)
        yield self._linear(mlp.down, self._inner, self._residual, matmul.ADD)

    def _norm(self, norm: RMSNorm) -> NDArray[np.void]:
        weight = self._packer.constant(norm.weight)
        return _op(program.NORM, x=self._residual, out=self._normed, weight=weight)

    def _linear(self, linear: FusedLinear, x: Region, out: Region, then: int) -> NDArray[np.void]:
        pack = self._packer.gated if then == matmul.GATED else self._packer.matrix
        packed = pack(linear.weight, linear.bias)
        _release(linear.weight)
        return _matmul(x, out, packed, then)


_NOWHERE: Final = Region(0, 0)


def _matmul(
    x: Region, out: Region, matrix: Matrix, then: int, *, to_logits: int = 0
) -> NDArray[np.void]:
    fields = matrix._asdict()
    return _op(program.MATMUL, x=x, out=out, then=then, to_logits=to_logits, **fields)


def _op(
    kind: int, *, x: Region = _NOWHERE, out: Region = _NOWHERE, **fields: Any
) -> NDArray[np.void]:
    op = np.zeros(1, OP)
    op["kind"] = kind
    op["scale"] = op["bias"] = NOWHERE
    op["x"], op["x_stride"] = x
    op["out"], op["out_stride"] = out
    for name, value in fields.items():
        op[name] = value
    return op


def _release(parameter: Tensor) -> None:
    """Give the memory back at once: two copies of a model may not fit."""
    assert isinstance(parameter, nn.Parameter)
    parameter.data = torch.empty(0, dtype=parameter.dtype)
