"""What a worker tells of its model, and the books it keeps, on any device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch

from pagemesh.shared.generation_config import generation_config
from pagemesh.shared.grammar import GrammarVocabulary
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.shared.prepared import PreparedModel, prepared_folder
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.batch import Batch
from pagemesh.worker_svc.grammars import Grammars
from pagemesh.worker_svc.memory import MemoryPlan
from pagemesh.worker_svc.models.config import DecoderConfig
from pagemesh.worker_svc.models.decoder import Decoder

log = structlog.get_logger(__name__)

DTYPES: Final = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def bytes_of_weights(config: DecoderConfig, dtype: torch.dtype) -> int:
    """What they will take once they are loaded."""
    unfilled = Decoder(config, dtype=dtype, device="meta")
    return sum(weight.nbytes for weight in unfilled.parameters())


def model_card(
    settings: Settings,
    prepared: PreparedModel,
    config: DecoderConfig,
    plan: MemoryPlan,
    dtype: torch.dtype,
) -> ModelCard:
    """Raises StartupError for a generation_config.json that cannot be used."""
    setting = settings.model.generation_config
    sampling = generation_config(prepared_folder(settings.model), setting)
    log.info("sampling_defaults", generation_config=setting, **sampling.defaults)
    return ModelCard(
        names=settings.model.served_model_name or [prepared.name],
        vocab_tokens=prepared.vocab_tokens,
        max_model_len=plan.max_model_len,
        block_tokens=plan.block_tokens,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=sorted({*prepared.eos_token_ids, *sampling.eos_token_ids}),
        bos_token_id=prepared.bos_token_id,
        fingerprint=prepared.fingerprint,
        created_s=prepared.created_s,
        quantization=settings.model.quantization,
        defaults=sampling.defaults,
        hidden_size=config.hidden_size,
    )


def new_batch(card: ModelCard, capacity: Capacity) -> Batch:
    return Batch(
        max_num_seqs=capacity.max_num_seqs,
        max_model_len=card.max_model_len,
        vocab_tokens=card.vocab_tokens,
        block_tokens=card.block_tokens,
        num_blocks=capacity.num_blocks,
    )


def new_grammars(folder: Path, card: ModelCard) -> Grammars:
    """Over the tokens of the prepared model in `folder`."""
    load = partial(GrammarVocabulary, folder, card.vocab_tokens, card.eos_token_ids)
    return Grammars(load, card.vocab_tokens)
