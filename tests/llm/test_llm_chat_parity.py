"""The server's chat endpoint and `LLM.chat` make the same prompt of the same messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llm_helpers import GREEDY

from pagemesh import LLM, SamplingParams
from pagemesh.gateway.openai.chat import chat_prompt
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.shared.messages import Generate
from pagemesh.shared.wire import unpack_ids

USER = {"role": "user", "content": "the page table"}
SYSTEM = {"role": "system", "content": "a block of the pool"}
ASSISTANT = {"role": "assistant", "content": "page by page"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "the page"}, {"type": "text", "text": " table"}],
}


def served_ids(llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """Prompt ids of a JSON body, through the gateway's schema and the tokenizer's core."""
    body = {"model": "tiny", "messages": messages, **options}
    request = msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest)
    prompt = chat_prompt(request, request.messages)
    params = SamplingParams(temperature=0, max_tokens=1, seed=1)
    generate = Generate("served", 1, llm.card.names[0], prompt, params)
    return unpack_ids(llm._pipeline.prepare(generate, llm.card).prompt_ids)


@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [PARTS]],
    ids=["one", "system", "turns", "parts"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"colour": "blue"}},
    ],
    ids=["plain", "no-generation-prompt", "continued", "template-kwargs"],
)
def test_chat_prompts_are_the_same_ids(
    llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    (output,) = llm.chat(messages, GREEDY, **options)
    assert output.prompt_token_ids == served_ids(llm, messages, options)
