"""What vLLM's clients ask beside OpenAI's routes, of a real mesh."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from mesh_process import MeshProcess

pytestmark = pytest.mark.mesh
ASK: Any = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Name a colour."}],
    "temperature": 0,
    "max_tokens": 12,
}


def post(mesh: MeshProcess, path: str, body: Any) -> tuple[int, Any]:
    answer = requests.post(mesh.base_url + path, json=body, timeout=60)
    return answer.status_code, answer.json()


def test_what_is_rendered_generates_what_the_conversation_does(mesh: MeshProcess) -> None:
    status, prompt = post(mesh, "/v1/chat/completions/render", ASK)
    assert status == 200
    assert "<|im_start|>user\nName a colour.<|im_end|>" in prompt["text"]
    _, answer = post(mesh, "/v1/chat/completions", ASK)
    assert len(prompt["token_ids"]) == answer["usage"]["prompt_tokens"]
    status, tokens = post(mesh, "/inference/v1/generate", prompt)
    assert status == 200
    ids = tokens["choices"][0]["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"]
    _, text = post(mesh, "/detokenize", {"model": ASK["model"], "tokens": ids})
    assert text["prompt"].removesuffix("<|im_end|>") == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10_000},
        {"messages": [{"role": "user", "content": "word " * 4000}]},
        {"structured_outputs": {"regex": "("}},
    ],
)
def test_what_cannot_be_generated_cannot_be_rendered(mesh: MeshProcess, fields: Any) -> None:
    real = post(mesh, "/v1/chat/completions", ASK | fields)
    assert real[0] == 400
    assert post(mesh, "/v1/chat/completions/render", ASK | fields) == real
