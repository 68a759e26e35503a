"""Bad requests: each a 4xx in OpenAI's shape that names the field; a stream beside them goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from gateway_fakes import (
    MAX_MODEL_LEN,
    VOCAB_TOKENS,
    Conversation,
    FakeTokenizer,
    Gateway,
    read_events,
    say_hello,
)

from pagemesh.gateway.openai.fields import CHAT_REFUSED, HARMLESS, REFUSED
from pagemesh.gateway.openai.schema import ChatRequest, CompletionRequest
from pagemesh.shared import wire

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]

# (path, fields over a good request, the param that the error names)
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [*USER, {"role": "wizard", "content": "Hi"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "id": 2**70}]}, "messages[0]"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": "5"}, "max_tokens"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": 2**40}, "max_tokens"),
    (CHAT, {"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_p": 1.5}, "top_p"),
    (CHAT, {"top_k": 0.01}, "top_k"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 129}, "n"),
    (CHAT, {"n": 2, "best_of": 3}, "best_of"),
    (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"seed": 1.5}, "seed"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a", ""]}, "stop"),
    (CHAT, {"stop": [1]}, "stop[0]"),
    (CHAT, {"stop": ["a"] * 1025}, "stop"),
    (CHAT, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [VOCAB_TOKENS]}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [2**80]}, "stop_token_ids"),
    (CHAT, {"logit_bias": {"AI": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {str(VOCAB_TOKENS): 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias"),
    (CHAT, {"logit_bias": [1]}, "logit_bias"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"priority": "high"}, "priority"),
    (CHAT, {"cache_salt": 7}, "cache_salt"),
    (CHAT, {"cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"cache_salt": "s" * 257}, "cache_salt"),
    (CHAT, {"prompt_cache_key": 7}, "prompt_cache_key"),
    (CHAT, {"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
    (CHAT, {"model": 5}, "model"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (CHAT, {"chat_template_kwargs": {"x": 2**64}}, "chat_template_kwargs"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [VOCAB_TOKENS]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**62]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2**90]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 513}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 512, "n": 3}, "n"),
    (COMPLETIONS, {"prompt": [[1]] * 9, "n": 128}, "n"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1000}, "logprobs"),
    (COMPLETIONS, {"echo": "yes"}, "echo"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": None, "messages": [{"role": "x"}]}, "messages[0].role"),
    ("/detokenize", {"tokens": [VOCAB_TOKENS]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": None}, "tokens"),
]

BAD_BODIES = [
    b"",
    b"  ",
    b"hello",
    b"[]",
    b"null",
    b'"text"',
    b'{"model": "tiny", "messages": [',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]} trailing',
    b'{"messages": ' + b"[" * 100_000,
    b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 200 + b"]" * 200 + b"}]}",
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": '
    + b'{"b":' * 100
    + b"1"
    + b"}" * 100
    + b"}}",
]

GOOD = {
    CHAT: {"model": "tiny", "messages": USER},
    COMPLETIONS: {"model": "tiny", "prompt": "Hi"},
    "/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/detokenize": {"model": "tiny", "tokens": [65]},
}


def assert_openai_error(status: int, answer: dict[str, Any], param: str | None, why: Any) -> None:
    assert status == 400, (why, answer)
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["param"] == param, (why, error)
    assert error["message"]


async def test_bad_fields_are_named_and_a_stream_beside_them_goes_on(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    healthy = asyncio.Queue[Conversation]()

    async def first_by_hand(talk: Conversation) -> None:
        if talk.generate.prompt.text == "healthy":
            talk.accept()
            talk.delta("start ", [1])
            healthy.put_nowait(talk)
        else:
            await say_hello(talk)

    tokenizer.script = first_by_hand
    body = {"model": "tiny", "prompt": "healthy", "stream": True}
    async with gateway.session.post(gateway.url + COMPLETIONS, json=body) as response:
        await _bad_requests_while_speaking(gateway, await healthy.get())
        events = await read_events(response)
    texts = [msgspec.json.decode(event)["choices"][0]["text"] for event in events[:-1]]
    pieces = [f"piece {i} " for i in range(len(BAD_FIELDS))]
    assert "".join(texts) == "".join(["start ", *pieces, "end"])
    assert events[-1] == "[DONE]"


async def _bad_requests_while_speaking(gateway: Gateway, talk: Conversation) -> None:
    for i, (path, fields, param) in enumerate(BAD_FIELDS):
        talk.delta(f"piece {i} ", [i])
        status, answer = await gateway.post(path, GOOD[path] | fields)
        assert_openai_error(status, answer, param, (path, fields))
    talk.delta("end", [], finish_reason="stop")


async def test_bad_bodies(gateway: Gateway) -> None:
    for body in BAD_BODIES:
        status, answer = await gateway.post_raw(CHAT, body)
        assert status == 400, (body[:80], answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"]
    status, _ = await gateway.post(CHAT, GOOD[CHAT])
    assert status == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_means_absent_for_every_optional_field(
    gateway: Gateway, tokenizer: FakeTokenizer, path: str
) -> None:
    schema = ChatRequest if path == CHAT else CompletionRequest
    names = {*schema.__struct_fields__, *REFUSED, *CHAT_REFUSED, *HARMLESS}
    optional = dict.fromkeys(names - {"messages", "prompt"})
    status, answer = await gateway.post(path, optional | GOOD[path])
    assert status == 200, answer
    status, _ = await gateway.post(path, GOOD[path])
    with_nulls, without = [talk.generate for talk in tokenizer.talks.values()]
    apart = {"request_id": "", "arrival_s": 0, "params": None}
    both = [msgspec.structs.replace(each, **apart) for each in (with_nulls, without)]
    assert both[0] == both[1]
    as_dict = [msgspec.structs.asdict(g.params) | {"seed": 0} for g in (with_nulls, without)]
    assert as_dict[0] == as_dict[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_known_fields_that_are_not_served_are_refused_by_name(
    gateway: Gateway, path: str
) -> None:
    for name, neutral in (CHAT_REFUSED if path == CHAT else REFUSED).items():
        status, answer = await gateway.post(path, GOOD[path] | {name: {"asks": "something"}})
        assert_openai_error(status, answer, name, name)
        assert answer["error"]["code"] == "unsupported_parameter"
        for value in neutral:
            status, answer = await gateway.post(path, GOOD[path] | {name: value})
            assert status == 200, (name, value, answer)


async def test_unknown_and_harmless_fields_are_accepted_and_the_unknown_counted(
    gateway: Gateway,
) -> None:
    extra = {"num_ctx": 4096, "keep_alive": "5m", "user": "me", "metadata": {"a": "b"}}
    status, _ = await gateway.post(CHAT, GOOD[CHAT] | extra | {"weird name\n": 1})
    assert status == 200
    text = await gateway.metrics()
    assert 'pagemesh_unknown_fields_total{endpoint="chat",field="num_ctx"} 1.0' in text
    assert 'pagemesh_unknown_fields_total{endpoint="chat",field="(other)"} 1.0' in text
    assert 'field="user"' not in text


async def test_unknown_fields_of_messages_are_accepted_and_counted(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    message = {"role": "user", "content": "x", "id": "m1", "opts": {"a": 1}, "name": "me"}
    status, _ = await gateway.post(CHAT, GOOD[CHAT] | {"messages": [message, message]})
    assert status == 200
    text = await gateway.metrics()
    for name in ("id", "opts"):
        assert f'unknown_fields_total{{endpoint="chat",field="messages.{name}"}} 1.0' in text
    assert "messages.name" not in text


async def test_a_body_of_countless_fields_is_refused(gateway: Gateway) -> None:
    fields = {f"made_up_{i}": i for i in range(1024)}
    status, answer = await gateway.post(CHAT, GOOD[CHAT] | fields)
    assert_openai_error(status, answer, None, "fields")


async def test_labels_of_unknown_fields_are_bounded(gateway: Gateway) -> None:
    fields = {f"made_up_{i}": i for i in range(200)}
    status, _ = await gateway.post(CHAT, GOOD[CHAT] | fields)
    assert status == 200
    text = await gateway.metrics()
    assert text.count("pagemesh_unknown_fields_total{") <= 65


GOOD_FIELDS = [
    {"top_k": 9_999_999},
    {"top_k": -1},
    {"temperature": 0},
    {"temperature": 2},
    {"seed": -(2**63)},
    {"logit_bias": {"0": -100, str(VOCAB_TOKENS - 1): 100}},
    {"stop": []},
    {"stop": ["a"] * 20},
    {"n": 1, "best_of": 1},
    {"priority": -5, "cache_salt": "tenant"},
    {"prompt_cache_key": "", "cache_salt": "é" * 256},
    {"max_tokens": 5, "max_completion_tokens": 6},
    {"messages": [{"role": "assistant", "content": "only me"}]},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}], "id": "m1"}]},
    {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
        ]
    },
    {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True},
]


async def test_values_at_the_edge_pass(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    for fields in GOOD_FIELDS:
        status, answer = await gateway.post(CHAT, GOOD[CHAT] | fields)
        assert status == 200, (fields, answer)
    by_limit = {talk.generate.params.max_tokens for talk in tokenizer.talks.values()}
    assert by_limit == {None, 6}
    last = list(tokenizer.talks.values())[-1].generate.prompt
    assert last.continue_final_message
    assert not last.add_generation_prompt
    assert last.template_kwargs == {"enable_thinking": False}


async def test_a_request_that_no_frame_can_hold_harms_only_itself(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 4096)
    status, answer = await gateway.post(COMPLETIONS, {"prompt": "x" * 5000})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert (await gateway.post(COMPLETIONS, {"prompt": "x"}))[0] == 200


async def test_tolerated_bodies(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """NUL, duplicated keys (the last wins), any content type."""
    body = b'{"messages": [{"role": "user", "content": "a\\u0000b"}], "seed": 1, "seed": -2}'
    headers = {"content-type": "text/plain"}
    url = gateway.url + CHAT
    async with gateway.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200
    (talk,) = tokenizer.talks.values()
    assert talk.generate.prompt.messages == [{"role": "user", "content": "a\0b"}]
    assert talk.generate.params.seed == -2


async def test_a_prompt_over_the_limit_says_both_numbers(gateway: Gateway) -> None:
    ids = [5] * (MAX_MODEL_LEN + 1)
    status, answer = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": ids})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer["error"]["message"]
    assert str(MAX_MODEL_LEN + 1) in answer["error"]["message"]


async def test_choices_over_the_limit_are_refused_with_both_numbers(gateway: Gateway) -> None:
    status, answer = await gateway.post(COMPLETIONS, {"prompt": [[1]] * 512, "n": 128})
    assert_openai_error(status, answer, "n", "choices")
    assert "at most 1024 choices, got n 128 for 512 prompts" in answer["error"]["message"]


async def test_as_many_prompts_as_are_taken_are_served(gateway: Gateway) -> None:
    status, answer = await gateway.post(COMPLETIONS, {"prompt": [[1]] * 512, "n": 2})
    assert status == 200
    assert len(answer["choices"]) == 1024
