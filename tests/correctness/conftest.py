"""The real model twice: in transformers, once a session, and in `LLM` under any settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import Ids, greedy_ids
from prompts import CHATS, TEXTS

from pagemesh import LLM
from pagemesh.shared.messages import Prompt
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc.text_model import TextModel
from pagemesh.worker_svc import cpu_build
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.models.decoder import Decoder

MAX_MODEL_LEN = 320


MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def hf_model(smollm2_folder: Path) -> Any:
    """transformers' model of the same GGUF file in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    (name,) = load_prepared(smollm2_folder).weights
    config = AutoConfig.from_pretrained(smollm2_folder, gguf_file=name)
    # from_pretrained reads GGUF files only with `accelerate`, which nothing else here needs.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    file = str(smollm2_folder / name)
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


@pytest.fixture(scope="session")
def prompt_ids(smollm2_folder: Path) -> Ids:
    text_model = TextModel(smollm2_folder, load_prepared(smollm2_folder), Settings())
    prompts = {name: Prompt(text=text) for name, text in TEXTS.items()}
    prompts |= {f"chat {name}": Prompt(messages=chat) for name, chat in CHATS.items()}
    return {name: text_model.encode(prompt) for name, prompt in prompts.items()}


@pytest.fixture(scope="session")
def reference(hf_model: Any, llm: LLM, prompt_ids: Ids) -> Ids:
    """The greedy ids of transformers, end-of-sequence ids included as any other.

    They are drafted by one batch of ours and then proven, prompt by prompt, in transformers: if at
    every position the draft is the most probable next id after what stands before it, it is what
    transformers generates greedily. One pass does it instead of N_TOKENS.
    """
    drafts = greedy_ids(llm, prompt_ids, prompt_ids)
    for name, ids in prompt_ids.items():
        best = _best_next(hf_model, ids + drafts[name])[len(ids) - 1 : -1]
        assert drafts[name] == best, f"{name}: not what transformers says"
    return drafts


def _best_next(model: Any, ids: list[int]) -> list[int]:
    """The most probable next id at every position of `ids`."""
    with torch.inference_mode():
        best: list[int] = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    return best


@pytest.fixture(scope="session")
def make_llm(smollm2_folder: Path) -> MakeLLM:
    """`LLM` of the real model, in float32 unless told otherwise. The file is read once a dtype."""
    prepared = load_prepared(smollm2_folder)

    @cache
    def decoder(dtype: torch.dtype) -> Decoder:
        return load_decoder(smollm2_folder, prepared, dtype=dtype, device="cpu")

    def make(**settings: Any) -> LLM:
        usual = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_memory": "1GiB",
        }
        with pytest.MonkeyPatch.context() as patch:
            # A copy, because the worker takes the weights over.
            patch.setattr(
                cpu_build, "load_decoder", lambda *_, dtype, **__: copy.deepcopy(decoder(dtype))
            )
            return LLM(**{**usual, **settings})

    return make


@pytest.fixture(scope="session")
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()
