"""What broke in other servers, asked of the real mesh: each is answered well or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from mesh_process import MeshProcess

pytestmark = pytest.mark.mesh
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
VOCAB_TOKENS = 49152
BROKEN = {"type": "object", "properties": {"foo": "bar"}}


def asked(mesh: MeshProcess, path: str, **fields: Any) -> tuple[int, Any]:
    """Status and body, which must be JSON that strict readers take."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 1, **fields}
    answer = requests.post(f"{mesh.base_url}{path}", json=body, timeout=60)
    for word in ("NaN", "Infinity"):
        assert word not in answer.text
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB_TOKENS]}, "prompt"),
        (COMPLETIONS, {"prompt": [2**63]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(VOCAB_TOKENS): 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "stop": [""]}, "stop"),
        (CHAT, {"messages": USER, "guided_json": BROKEN}, "guided_json"),
        (CHAT, {"messages": USER, "guided_regex": "(a"}, "guided_regex"),
        (CHAT, {"messages": USER, "guided_grammar": "no grammar"}, "guided_grammar"),
        (
            CHAT,
            {
                "messages": USER,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": BROKEN},
                },
            },
            "response_format",
        ),
    ],
)
def test_refused_by_name(mesh: MeshProcess, path: str, fields: dict[str, Any], param: str) -> None:
    status, answer = asked(mesh, path, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "assistant", "content": "only me"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
        (CHAT, {"messages": [{**USER[0], "id": "m1"}], "num_ctx": 4096}),
        (CHAT, {"messages": USER, "stop": None, "tools": None, "top_p": None}),
        (CHAT, {"messages": USER, "top_k": 9_999_999}),
        (CHAT, {"messages": [{"role": "user", "content": "a\0b"}]}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "top_k": 1, "echo": True}),
    ],
)
def test_answered(mesh: MeshProcess, path: str, fields: dict[str, Any]) -> None:
    status, answer = asked(mesh, path, **fields)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"


def test_scoring_generates_nothing_and_a_warm_cache_scores_the_same(mesh: MeshProcess) -> None:
    fields = {"prompt": "Pages of memory, " * 8, "echo": True, "logprobs": 1, "max_tokens": 0}
    (status, cold), (_, warm) = (asked(mesh, COMPLETIONS, **fields) for _ in range(2))
    assert status == 200
    assert cold["usage"]["completion_tokens"] == 0
    scored = cold["choices"][0]["logprobs"]["token_logprobs"]
    assert len(scored) == cold["usage"]["prompt_tokens"]
    assert scored[0] is None
    assert None not in scored[1:]
    assert warm["choices"] == cold["choices"]


def test_a_prompt_that_is_too_long_holds_nothing_up(mesh: MeshProcess) -> None:
    status, answer = asked(mesh, COMPLETIONS, prompt="page " * 5000)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in answer["error"]["message"]
    assert asked(mesh, COMPLETIONS, prompt="page")[0] == 200
