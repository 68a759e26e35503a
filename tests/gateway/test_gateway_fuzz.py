"""Whatever a body holds, it is refused by a 400 or becomes messages that survive the wire."""

from __future__ import annotations

from typing import Any

import msgspec
from gateway_fakes import CARD
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.openai.answer import Job
from pagemesh.gateway.openai.body import SHORT_BYTES, BodyDecoder
from pagemesh.gateway.openai.chat import chat_prompt
from pagemesh.gateway.openai.chat_options import with_options
from pagemesh.gateway.openai.fields import CHAT_REFUSED, REFUSED
from pagemesh.gateway.openai.params import Seeds, chat_params, completion_params
from pagemesh.gateway.openai.prompts import completion_prompts
from pagemesh.gateway.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Prompt
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import decode, encode

integers = st.one_of(
    st.integers(-2, 20), st.sampled_from([2**31, 2**31 - 1, -(2**31), 2**63, -(2**63), 2**64])
)
scalars = st.one_of(
    st.none(), st.booleans(), integers, st.floats(allow_nan=False, allow_infinity=False), st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": values, "tool_calls": values, "name": values, "x": values},
    ),
    max_size=3,
)
prompts = st.one_of(
    st.text(), st.lists(st.text()), st.lists(integers), st.lists(st.lists(integers)), values
)


def bodies(schema: type[GenerationRequest], required: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly right: the required field, and a few others with values of any kind."""
    names = [name for name in schema.__struct_fields__ if name not in required]
    some = st.dictionaries(st.sampled_from(names), values, max_size=3)
    return st.builds(lambda fixed, others: others | fixed, st.fixed_dictionaries(required), some)


def check(body: GenerationRequest, prompt_list: list[Prompt], params: SamplingParams) -> None:
    job = Job("id", 1, ServedModel("tiny", CARD), body, prompt_list, params)
    for generate in job.generates(Seeds(1)):
        assert decode(encode(generate)) == generate


@given(body=bodies(ChatRequest, {"messages": messages}))
def test_chat(body: dict[str, Any]) -> None:
    decoder = BodyDecoder(ChatRequest, CHAT_REFUSED)
    try:
        request, _ = decoder.decode(msgspec.json.encode(body))
        bare = chat_prompt(request, request.messages)
        prompt = with_options(bare, request, trusts_templates=True)
        check(request, [prompt], chat_params(request, CARD))
    except RequestError as error:
        refused(error)


@given(body=bodies(CompletionRequest, {"prompt": prompts}))
def test_completions(body: dict[str, Any]) -> None:
    decoder = BodyDecoder(CompletionRequest, REFUSED)
    try:
        request, _ = decoder.decode(msgspec.json.encode(body))
        found = completion_prompts(request, CARD)
        check(request, found, completion_params(request, CARD))
    except RequestError as error:
        refused(error)


@given(
    body=bodies(CompletionRequest, {"prompt": prompts}),
    others=st.dictionaries(st.sampled_from(["user", "tools", "made_up", "suffix"]), values),
)
def test_short_bodies_are_read_as_long_ones(body: dict[str, Any], others: dict[str, Any]) -> None:
    encoded = msgspec.json.encode(body | others)
    assert read(encoded) == read(encoded + b" " * SHORT_BYTES)


def read(encoded: bytes) -> object:
    """All that a completion's body comes to."""
    try:
        request, unknown = BodyDecoder(CompletionRequest, REFUSED).decode(encoded)
    except RequestError as error:
        return error.message, error.code, error.param
    return msgspec.to_builtins(request), unknown


@given(body=st.binary())
def test_bytes(body: bytes) -> None:
    decoder = BodyDecoder(ChatRequest, CHAT_REFUSED)
    try:
        decoder.decode(body)
    except RequestError as error:
        refused(error, names_a_field=False)


def refused(error: RequestError, *, names_a_field: bool = True) -> None:
    assert error.status == 400
    assert error.code
    assert error.param or not names_a_field
