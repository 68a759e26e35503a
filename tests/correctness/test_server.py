"""The whole mesh answers what transformers generates, all prompts at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from greedy import N_TOKENS, Ids
from mesh_process import MeshProcess

from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.settings import Settings
from pagemesh.tokenizer_svc.text_model import TextModel

pytestmark = [pytest.mark.model, pytest.mark.mesh, pytest.mark.timeout(600)]

GREEDY: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "temperature": 0,
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "skip_special_tokens": False,
    # The strings of the tokens come with their logprobs, and no other way.
    "logprobs": 0,
}


@pytest.fixture(scope="module")
def text_model(smollm2_folder: Path) -> TextModel:
    return TextModel(smollm2_folder, load_prepared(smollm2_folder), Settings())


async def complete(session: aiohttp.ClientSession, prompt_ids: list[int]) -> dict[str, Any]:
    async with session.post("/v1/completions", json={**GREEDY, "prompt": prompt_ids}) as answer:
        assert answer.status == 200, await answer.text()
        body: dict[str, Any] = await answer.json()
    return body


async def test_all_prompts_at_once(
    mesh: MeshProcess, text_model: TextModel, prompt_ids: Ids, reference: Ids
) -> None:
    async with aiohttp.ClientSession(mesh.base_url) as session:
        answers = await asyncio.gather(*(complete(session, ids) for ids in prompt_ids.values()))
    for name, answer in zip(prompt_ids, answers, strict=True):
        [choice] = answer["choices"]
        expected = [text_model.token_str(token_id) for token_id in reference[name]]
        assert choice["logprobs"]["tokens"] == expected, name
        assert choice["text"] == text_model.decode(reference[name], skip_special_tokens=False)
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == N_TOKENS
