"""Greedy ids of the real model, which every test here compares."""

from __future__ import annotations

from collections.abc import Iterable

from pagemesh import LLM, SamplingParams
from pagemesh.llm import PromptInput

N_TOKENS = 64

Ids = dict[str, list[int]]


def greedy_ids(llm: LLM, prompt_ids: Ids, names: Iterable[str], max_tokens: int = N_TOKENS) -> Ids:
    """The greedy ids of the named prompts, in one call."""
    names = list(names)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts: list[PromptInput] = [{"prompt_token_ids": prompt_ids[name]} for name in names]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {name: out.outputs[0].token_ids for name, out in zip(names, outputs, strict=True)}
