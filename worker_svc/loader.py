"""Fill a decoder with the weights of a prepared folder, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import PreparedModel
from pagemesh.worker_svc.checkpoint import StoredTensor, read_safetensors
from pagemesh.worker_svc.gguf_weights import GGUFWeights
from pagemesh.worker_svc.load_progress import Tell, loading_bar
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder

_DUMMY_STD: Final = 0.02


def load_decoder(
    folder: Path,
    prepared: PreparedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tell: Tell = lambda doing: None,
) -> Decoder:
    """The decoder of `folder`, in `dtype` on `device`. `tell` hears how far it is.

    Beside the model itself a part of one stored tensor is in memory. Raises StartupError naming the
    file when one is missing, truncated or does not fit config.json.
    """
    decoder = Decoder(DecoderConfig.from_folder(folder), dtype=dtype, device=device)
    fill_decoder(decoder, folder, prepared, tell)
    return decoder.eval()


def fill_decoder(
    decoder: Decoder, folder: Path, prepared: PreparedModel, tell: Tell = lambda doing: None
) -> None:
    """Load the weights into `decoder`: see `load_decoder`."""
    if prepared.weights_format == "dummy":
        _fill_at_random(decoder)
    else:
        _fill(decoder, folder, prepared, tell)


def _fill(decoder: Decoder, folder: Path, prepared: PreparedModel, tell: Tell) -> None:
    views = dict(decoder.weight_views())
    with loading_bar(prepared.name, sum(view.nbytes for view in views.values()), tell) as bar:
        for name in prepared.weights:
            for stored in _tensors(decoder, folder / name, prepared.weights_format):
                for placed_bytes in _place(stored, views, folder / name, decoder.config):
                    bar.update(placed_bytes)
    if views:
        raise StartupError(
            f"{folder} lacks {min(views)}{_more(len(views) - 1)}: a weights file is missing or "
            "belongs to another model; fetch the model again"
        )


def _tensors(decoder: Decoder, path: Path, weights_format: str) -> Iterator[StoredTensor]:
    if weights_format == "safetensors":
        yield from read_safetensors(path)
        return
    weights = GGUFWeights(path, decoder.config)
    factors = weights.rope_factors()
    # A config that already states Llama 3's scaling says the same as the factors do.
    if factors is not None and decoder.config.rope.kind != "llama3":
        decoder.rotary.divide_frequencies(factors)
    yield from weights.tensors()


def _place(
    stored: StoredTensor, views: dict[str, Tensor], path: Path, config: DecoderConfig
) -> Iterator[int]:
    """Copy one tensor to its view, part by part, and strike it off; yields the bytes filled."""
    if _is_redundant(stored.name, config):
        return
    view = views.pop(stored.name, None)
    if view is None:
        raise StartupError(
            f"{path}: {stored.name} has no place in a {config.architecture} of this config.json, "
            "and leaving it out would change the model's answers"
        )
    if stored.shape != tuple(view.shape):
        raise StartupError(
            f"{path}: {stored.name} has shape {list(stored.shape)}, config.json asks for "
            f"{list(view.shape)}: weights and config.json belong to different models"
        )
    for rows, values in stored.parts():
        place = view[rows]
        place.copy_(values)
        yield place.nbytes


def _is_redundant(name: str, config: DecoderConfig) -> bool:
    """Tensors that old checkpoints carry and that say nothing new."""
    tied_head = name == "lm_head.weight" and config.tied_embeddings
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _more(count: int) -> str:
    return f" and {count} more tensors" if count else ""


def _fill_at_random(decoder: Decoder) -> None:
    """Norms as ones, the rest small noise: for speed tests, the same in every run."""
    device = decoder.embedding.device
    generator = torch.Generator(device).manual_seed(0)
    for name, view in decoder.weight_views():
        if name.endswith("norm.weight"):
            view.fill_(1)
        else:
            view.normal_(0, _DUMMY_STD, generator=generator)
