"""Every field of a request has an effect on what is sent on or answered, or is refused by name.

The tables name each field of the schemas, so a new one fails here until it has a row.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import pytest
from gateway_fakes import (
    CARD,
    Conversation,
    FakeTokenizer,
    Gateway,
    engine,
    logprob_row,
    running_gateway,
    settings_for,
)

from pagemesh.gateway.openai.fields import CHAT_REFUSED, COMPLETION_REFUSED, HARMLESS
from pagemesh.gateway.openai.schema import ChatRequest, CompletionRequest
from pagemesh.shared.messages import Generate, PromptExtras
from pagemesh.shared.settings import Settings
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.text_parsers import TextParsers
from pagemesh.shared.wire import pack_ids

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": USER},
    COMPLETIONS: {"model": "tiny", "prompt": "Hi"},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
WORD = StructuredOutputsParams(choice=["a"], given_as="guided_choice")


class Row(NamedTuple):
    """A value, where it shows (`params`, `prompt` and `generate` were sent on, `answer` and `text`
    came back), as what, and the fields that it needs beside it."""

    value: Any
    place: str
    shown: Any
    beside: dict[str, Any] = {}


def param(name: str, value: Any) -> Row:
    return Row(value, f"params.{name}", value)


def rule(given_as: str, value: Any, **rule: Any) -> Row:
    return Row(
        value, "params.structured_outputs", StructuredOutputsParams(**rule, given_as=given_as)
    )


STREAM = {"stream": True}
SHARED: dict[str, Row] = {
    "model": Row("tiny-alias", "answer.model", "tiny-alias"),
    "stream": Row(True, "text", "[DONE]"),
    "stream_options": Row({"include_usage": True}, "text", '"choices":[],"usage":{', STREAM),
    "n": param("n", 2),
    "max_tokens": param("max_tokens", 3),
    "max_completion_tokens": Row(3, "params.max_tokens", 3, {"max_tokens": 2}),
    "min_tokens": param("min_tokens", 2),
    "temperature": param("temperature", 0.5),
    "top_p": param("top_p", 0.5),
    "top_k": param("top_k", 5),
    "min_p": param("min_p", 0.1),
    "presence_penalty": param("presence_penalty", 0.5),
    "frequency_penalty": param("frequency_penalty", 0.5),
    "repetition_penalty": param("repetition_penalty", 1.5),
    "logit_bias": Row({"5": -3}, "params.logit_bias", {5: -3}),
    "seed": param("seed", -7),
    "stop": Row("x", "params.stop", ["x"]),
    "stop_token_ids": param("stop_token_ids", [5]),
    "include_stop_str_in_output": param("include_stop_str_in_output", True),
    "ignore_eos": param("ignore_eos", True),
    "skip_special_tokens": param("skip_special_tokens", False),
    "prompt_logprobs": param("prompt_logprobs", 2),
    "priority": Row(-5, "generate.priority", -5),
    "timeout": Row(-1, "answer.error.param", "timeout"),
    "cache_salt": Row("s", "generate.cache_salt", "s"),
    "user": Row("me", "text", "choices"),
    "prompt_cache_key": Row("k", "generate.cache_key", "k"),
    "response_format": rule("response_format", {"type": "json_object"}, json_object=True),
    "structured_outputs": rule("structured_outputs", {"regex": "a"}, regex="a"),
    "guided_json": rule("guided_json", {"type": "object"}, json='{"type":"object"}'),
    "guided_regex": rule("guided_regex", "a", regex="a"),
    "guided_choice": rule("guided_choice", ["a"], choice=["a"]),
    "guided_grammar": rule("guided_grammar", "start: /a/", grammar="start: /a/"),
    "truncate_prompt_tokens": Row(-1, "prompt.extras.truncate_tokens", -1),
    "allowed_token_ids": param("allowed_token_ids", [5, 6]),
    "bad_words": param("bad_words", ["no"]),
    "service_tier": Row("flex", "answer.service_tier", "flex"),
}
CHAT_ROWS: dict[str, Row] = SHARED | {
    "messages": Row([{"role": "user", "content": "Yo"}], "prompt.messages.0.content", "Yo"),
    "best_of": Row(2, "answer.error.param", "best_of"),
    "add_special_tokens": Row(True, "prompt.add_special_tokens", True),
    "logprobs": Row(True, "params.logprobs", 0),
    "top_logprobs": Row(2, "params.logprobs", 2, {"logprobs": True}),
    "logprob_token_ids": param("logprob_token_ids", [5])._replace(beside={"logprobs": True}),
    "return_token_ids": Row(True, "answer.choices.0.token_ids", [10, 11, 12, 13]),
    "return_tokens_as_token_ids": Row(
        True, "answer.choices.0.logprobs.content.0.token", "token_id:10", {"logprobs": True}
    ),
    "add_generation_prompt": Row(False, "prompt.add_generation_prompt", False),
    "continue_final_message": Row(True, "prompt.continue_final_message", True),
    "chat_template_kwargs": Row({"a": 1}, "prompt.template_kwargs", {"a": 1}),
    "tools": Row(TOOLS, "prompt.tools", TOOLS, {"tool_choice": "required"}),
    "tool_choice": Row("none", "params.structured_outputs", None, {"tools": TOOLS}),
    "parallel_tool_calls": Row(
        False,
        "params.structured_outputs.json",
        '"maxItems":1',
        {"tools": TOOLS, "tool_choice": "required"},
    ),
    "include_reasoning": Row(False, "text", "choices"),
    "reasoning_effort": Row("low", "prompt.extras.options", {"reasoning_effort": "low"}),
    "thinking_token_budget": param("thinking_token_budget", 9),
    "verbosity": Row("high", "prompt.extras.options", {"verbosity": "high"}),
    "chat_template": Row("x", "answer.error.param", "chat_template"),
    "documents": Row([{"text": "x"}], "prompt.extras.documents", [{"text": "x"}]),
}
COMPLETION_ROWS: dict[str, Row] = SHARED | {
    "prompt": Row([1, 2], "prompt.token_ids", pack_ids([1, 2])),
    "best_of": Row(3, "params.n", 3),
    "add_special_tokens": Row(False, "prompt.add_special_tokens", False),
    "echo": Row(True, "answer.choices.0.text", "HiHello wörld 😀!"),
    "logprobs": param("logprobs", 2),
    "logprob_token_ids": param("logprob_token_ids", [5])._replace(beside={"logprobs": 0}),
    "return_token_ids": Row(True, "answer.choices.0.prompt_token_ids", [72, 105]),
    "return_tokens_as_token_ids": Row(
        True, "answer.choices.0.logprobs.tokens.0", "token_id:10", {"logprobs": 0}
    ),
    "suffix": Row("!", "prompt.extras.suffix", "!"),
}
# Of the rows whose value is that of a request without the field, or that show elsewhere alone.
SHOWN_ELSEWHERE = {
    "user": "test_gateway_routes.py",
    "include_reasoning": "test_gateway_tools.py",
}


def found(place: str, generate: Generate | None, text: str) -> Any:
    root, *path = place.split(".")
    if root == "text":
        return text
    value: Any = msgspec.json.decode(text)
    if root != "answer":
        if generate is None:
            raise LookupError(text)
        parts = {"params": generate.params, "prompt": generate.prompt, "generate": generate}
        value = msgspec.structs.asdict(parts[root])
    for key in path:
        if isinstance(value, StructuredOutputsParams):
            value = msgspec.structs.asdict(value)
        elif isinstance(value, PromptExtras):
            value = value._asdict()
        value = value[int(key) if isinstance(value, list) else key]
    return value


@pytest.mark.parametrize(
    ("path", "rows", "schema"),
    [(CHAT, CHAT_ROWS, ChatRequest), (COMPLETIONS, COMPLETION_ROWS, CompletionRequest)],
    ids=["chat", "completions"],
)
async def test_every_field_of_the_schema_has_its_effect(
    gateway: Gateway, tokenizer: FakeTokenizer, path: str, rows: dict[str, Row], schema: type
) -> None:
    assert rows.keys() == set(schema.__struct_fields__)  # type: ignore[attr-defined]

    async def asked(body: dict[str, Any]) -> tuple[Generate | None, str]:
        before = set(tokenizer.talks)
        async with gateway.session.post(gateway.url + path, json=body) as response:
            text = await response.text()
        new = [talk.generate for key, talk in tokenizer.talks.items() if key not in before]
        return new[0] if new else None, text

    for name, (value, place, shown, beside) in rows.items():
        generate, text = await asked(GOOD[path] | beside | {name: value})
        got = found(place, generate, text)
        if place == "text" or name == "parallel_tool_calls":
            assert shown in got, (name, text)
        else:
            assert got == shown, (name, text)
        if "error" in place:
            continue
        without, text = await asked(GOOD[path] | beside | {name: GOOD[path].get(name)})
        if name not in SHOWN_ELSEWHERE:
            try:
                bare = found(place, without, text)
            except (LookupError, TypeError, msgspec.DecodeError):
                bare = None
            assert bare is None or (shown not in bare if place == "text" else bare != got), name


# What vLLM and OpenAI know, and so must be served or refused here.
KNOWN = {
    CHAT: """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
        max_completion_tokens n presence_penalty response_format seed stop stream stream_options
        temperature top_p tools tool_choice parallel_tool_calls reasoning_effort include_reasoning
        user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
        include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
        bad_words logprob_token_ids echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs structured_outputs guided_json guided_regex guided_choice
        guided_grammar guided_decoding_backend guided_whitespace_pattern priority request_id
        return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
        thinking_token_budget logits_processors best_of service_tier metadata store
        prompt_cache_key prompt_cache_retention safety_identifier verbosity functions
        function_call modalities audio prediction web_search_options""",
    COMPLETIONS: """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
        presence_penalty seed stop stream stream_options suffix temperature top_p user
        use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
        include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids bad_words
        logprob_token_ids prompt_logprobs prompt_embeds add_special_tokens response_format
        structured_outputs guided_json guided_regex guided_choice guided_grammar priority
        request_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params
        vllm_xargs logits_processors thinking_token_budget service_tier prompt_cache_key""",
}


@pytest.mark.parametrize(
    ("path", "rows", "refused"),
    [(CHAT, CHAT_ROWS, CHAT_REFUSED), (COMPLETIONS, COMPLETION_ROWS, COMPLETION_REFUSED)],
    ids=["chat", "completions"],
)
def test_no_known_field_is_passed_over(
    path: str, rows: dict[str, Row], refused: dict[str, Any]
) -> None:
    """Refusals are tried one by one in test_gateway_bad_input."""
    assert set(KNOWN[path].split()) <= rows.keys() | refused.keys() | HARMLESS
    assert rows.keys().isdisjoint(refused)


async def test_a_tier_is_a_priority_unless_one_is_given(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    for fields in (
        {"service_tier": "priority"},
        {"service_tier": "auto"},
        {"service_tier": "flex"},
        {"service_tier": "priority", "priority": 3},
    ):
        status, answer = await gateway.post(CHAT, GOOD[CHAT] | fields)
        assert (status, answer["service_tier"]) == (
            200,
            fields["service_tier"].replace("auto", "default"),
        )
    sent = [talk.generate.priority for talk in tokenizer.talks.values()]
    assert sent == [-1, 0, 1, 3]


async def test_the_best_of_several_by_their_mean_logprob(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """Choice i of each prompt has a logprob of -(i * 2 % 5): 0, -2, -4, -1, -3."""

    async def rank(talk: Conversation) -> None:
        talk.accept()
        for choice in range(talk.generate.params.n):
            row = logprob_row(70, "x", 0)._replace(logprob=-float(choice * 2 % 5))
            text = f"{talk.generate.prompt.text}{choice}"
            ids, rows = [70] * (1 + choice), [row] * (1 + choice)
            talk.delta(text, ids, choice, logprobs=rows, finish_reason="stop")

    tokenizer.script = rank
    body = GOOD[COMPLETIONS] | {"prompt": ["a", "b"], "n": 2, "best_of": 5}
    status, answer = await gateway.post(COMPLETIONS, body)
    assert status == 200
    texts = [choice["text"] for choice in sorted(answer["choices"], key=itemgetter("index"))]
    assert texts == ["a0", "a3", "b0", "b3"]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 4 + 5)


@pytest.mark.parametrize(
    "fields", [{"best_of": 1, "n": 2}, {"best_of": 129}, {"best_of": 2, "stream": True}]
)
async def test_a_best_of_that_cannot_be_is_refused(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    status, answer = await gateway.post(COMPLETIONS, GOOD[COMPLETIONS] | fields)
    assert (status, answer["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streams_bring_the_ids_that_whole_answers_have(
    gateway: Gateway, tokenizer: FakeTokenizer, path: str
) -> None:
    for parsers in (TextParsers(), TextParsers(reasoning="think")):
        tokenizer.push([engine(card=CARD._replace(parsers=parsers))])
        body = GOOD[path] | {"return_token_ids": True, "n": 2, "stream": True}
        async with gateway.session.post(gateway.url + path, json=body) as response:
            text = await response.text()
        chunks = [msgspec.json.decode(part[6:]) for part in text.split("\n\n")[:-2]]
        ids: dict[int, list[int]] = {0: [], 1: []}
        prompts: dict[int, list[int]] = {}
        for chunk in chunks:
            [choice] = chunk["choices"]
            ids[choice["index"]] += choice.get("token_ids", [])
            given = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if given:
                assert choice["index"] not in prompts
                prompts[choice["index"]] = given
        assert ids == {0: [10, 11, 12, 13], 1: [10, 11, 12, 13]}
        assert prompts == {0: [72, 105], 1: [72, 105]}


async def test_the_models_defaults_stand_in_for_what_a_request_leaves_open(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 50}
    tokenizer.push([engine(card=CARD._replace(defaults=defaults))])
    while (await gateway.get("/v1/models/tiny"))[1]["default_sampling_params"] != defaults:
        pass
    for path in (CHAT, COMPLETIONS):
        for fields in ({}, {"temperature": 1, "top_k": 0, "max_tokens": 3}):
            status, _ = await gateway.post(path, GOOD[path] | fields)
            assert status == 200
    sent = [talk.generate.params for talk in tokenizer.talks.values()]
    assert [(p.temperature, p.top_k) for p in sent] == [(0.6, 20), (1.0, 0)] * 2
    # That of a chat is known where its prompt's length is.
    assert [p.max_tokens for p in sent] == [None, 3, 16, 3]


async def test_a_template_of_a_request_is_rendered_where_that_is_allowed(
    redis_url: str, mesh_name: str, tokenizer: FakeTokenizer
) -> None:
    settings: Settings = settings_for(redis_url, mesh_name, trust_request_chat_template=True)
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        status, _ = await gateway.post(CHAT, GOOD[CHAT] | {"chat_template": "{{ messages }}"})
    assert status == 200
    [talk] = tokenizer.talks.values()
    assert talk.generate.prompt.extras == PromptExtras(chat_template="{{ messages }}")


async def test_a_prompt_of_ids_may_be_longer_than_a_context_if_its_end_counts(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    ids = [7] * (CARD.max_model_len + 1)
    body = GOOD[COMPLETIONS] | {"prompt": ids}
    status, answer = await gateway.post(COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _ = await gateway.post(COMPLETIONS, body | {"truncate_prompt_tokens": 5})
    assert status == 200
    [talk] = tokenizer.talks.values()
    assert talk.generate.prompt.extras == PromptExtras(truncate_tokens=5)


BAD = [
    (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort"),
    (CHAT, {"verbosity": "loud"}, "verbosity"),
    (CHAT, {"service_tier": "gold"}, "service_tier"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [1000]}, "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    (
        CHAT,
        {"allowed_token_ids": [1], "tools": TOOLS, "tool_choice": "required"},
        "allowed_token_ids",
    ),
    (CHAT, {"bad_words": ["a", ""]}, "bad_words"),
    (CHAT, {"bad_words": ["a"] * 1025}, "bad_words"),
    (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    (CHAT, {"logprob_token_ids": [-1], "logprobs": True}, "logprob_token_ids"),
    (CHAT, {"logprob_token_ids": [1] * 129, "logprobs": True}, "logprob_token_ids"),
    (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget"),
    (CHAT, {"documents": [1]}, "documents[0]"),
    (CHAT, {"documents": [{}] * 1025}, "documents"),
    (CHAT, {"documents": [{"x": 2**70}]}, "documents"),
    (COMPLETIONS, {"suffix": "x", "echo": True}, "suffix"),
    (COMPLETIONS, {"suffix": "x", "prompt": [1]}, "suffix"),
]


async def test_values_that_cannot_be_are_refused_by_the_name_of_their_field(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    for path, fields, name in BAD:
        status, answer = await gateway.post(path, GOOD[path] | fields)
        assert (status, answer["error"]["param"]) == (400, name), (fields, answer)
    assert not tokenizer.talks
