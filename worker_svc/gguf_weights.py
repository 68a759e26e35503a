"""Weights of a GGUF file, dequantised and put back into the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc.checkpoint import Part, StoredTensor, damaged
from pagemesh.worker_svc.models.config import DecoderConfig

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"
# Elements dequantised at once (16 MiB of float32).
_CHUNK_ELEMENTS: Final = 2**22


class _Reader(GGUFReader):  # type: ignore[misc]  # gguf is not typed
    """Reads through a plain array: the bookkeeping of numpy.memmap for each of some hundred
    thousand slices would take two thirds of the time."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


class GGUFWeights:
    """An open GGUF file, checked against the configuration it is to fill.

    Raises StartupError when the file is missing, damaged, split, or asks for mathematics that
    config.json does not state.
    """

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self._path = path
        self._head_dim = config.head_dim
        try:
            self._reader = _Reader(path)
        # On a truncated file the reader fails wherever numpy happens to notice.
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise damaged(path, error) from error
        self._architecture = self._field("general.architecture", "unknown")
        self._check(config)

    def tensors(self) -> Iterator[StoredTensor]:
        """Every weight but the rotary factors, under its Hugging Face name."""
        for tensor in self._reader.tensors:
            if tensor.name != _ROPE_FACTORS:
                shape = tuple(int(size) for size in reversed(tensor.shape))
                name = _hugging_face_name(tensor.name)
                yield StoredTensor(name, shape, partial(self._parts, tensor))

    def rope_factors(self) -> Tensor | None:
        """float32[head_dim / 2] dividing the rotary frequencies: how llama.cpp keeps Llama 3's
        context extension, which the metadata do not mention."""
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                return _dequantised(tensor.data, tensor)
        return None

    def _parts(self, tensor: ReaderTensor) -> Iterator[Part]:
        """Dequantised in runs of rows, so that no second whole tensor exists."""
        n_rows, of_heads = int(tensor.shape[-1]), self._interleaves(tensor.name)
        step = max(1, _CHUNK_ELEMENTS // (tensor.n_elements // n_rows))
        if of_heads:  # whole heads
            step = max(1, step // self._head_dim) * self._head_dim
        for start in range(0, n_rows, step):
            rows = slice(start, start + step)
            try:
                values = _dequantised(tensor.data[rows], tensor)
            except NotImplementedError as error:
                raise StartupError(f"{self._path}: {tensor.name}: {error}") from error
            yield Part(rows, self._halves(values) if of_heads else values)

    def _interleaves(self, name: str) -> bool:
        """Whether the rows of each head stand in llama.cpp's order.

        llama.cpp turns neighbouring elements of a head together, Hugging Face elements half a head
        apart, so the converter interleaves the halves for architecture llama (and no other here).
        """
        projection = re.search(r"\.attn_[qk]\.(weight|bias)$", name)
        return self._architecture == "llama" and projection is not None

    def _halves(self, rows: Tensor) -> Tensor:
        """Interleaved rows of whole heads, put back."""
        pairs = rows.reshape(-1, self._head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _field(self, key: str, default: Any) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _check(self, config: DecoderConfig) -> None:
        self._check_kind()
        for key, values in _expected_fields(config).items():
            value = self._field(f"{self._architecture}.{key}", None)
            if value is not None and value not in values:
                raise StartupError(
                    f"{self._path}: {self._architecture}.{key} = {value} does not agree with "
                    "config.json; correct config.json, or use the safetensors form of the model"
                )

    def _check_kind(self) -> None:
        if self._architecture not in _ARCHITECTURES:
            raise StartupError(
                f"{self._path}: GGUF architecture {self._architecture} is not supported; supported "
                f"are {', '.join(_ARCHITECTURES)}"
            )
        if self._field("split.count", 1) > 1:
            raise StartupError(
                f"{self._path} is one part of a split GGUF: merge the parts with "
                "`llama-gguf-split --merge`"
            )


def _expected_fields(config: DecoderConfig) -> dict[str, set[Any]]:
    """Field of the GGUF, without its architecture → the values that agree with `config`."""
    windows = {window for window in config.windows if window is not None}
    kind = config.rope.kind
    return {
        "rope.scaling.type": {kind, "none"} if kind == "default" else {kind},
        "attention.sliding_window": windows or {0},
        "attention.key_length": {config.head_dim},
        "attention.value_length": {config.head_dim},
        "rope.dimension_count": {config.head_dim},
        "expert_count": {0},
    }


def _hugging_face_name(name: str) -> str:
    """The same tensor's name in a Hugging Face checkpoint; an unknown name is returned as it is."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name


def _dequantised(data: np.ndarray, tensor: ReaderTensor) -> Tensor:
    """float32 copy of rows of a tensor (dequantize may return a read-only view of the file)."""
    return torch.from_numpy(np.require(dequantize(data, tensor.tensor_type), requirements="W"))
