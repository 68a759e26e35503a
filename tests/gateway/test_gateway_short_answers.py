"""What makes a short answer cheap changes nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gateway_fakes import CARD, engine
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pagemesh.gateway.directory import ModelDirectory
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.openai import known_params
from pagemesh.gateway.openai.known_params import MAX_BODY_BYTES, MAX_KNOWN, KnownParams
from pagemesh.gateway.openai.params import chat_params, completion_params
from pagemesh.gateway.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from pagemesh.gateway.random_ids import RandomIds
from pagemesh.gateway.request_body import read_body
from pagemesh.gateway.upstream import Upstream
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Cancel, Generate, ModelCard, Prompt
from pagemesh.shared.wire import Message

WARM = CARD._replace(defaults={"temperature": 0.5, "top_k": 20})
CHAT = ChatRequest(messages=[])
COMPLETION = CompletionRequest(prompt="")
# Of every kind of value, so that some go with any field.
SOME: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, 2, 5, 0.0, 0.5, 1.0, "", "a", "low", ["a"], [1], {"1": 2.0}, {}]
)


def requests_like(plain: GenerationRequest) -> st.SearchStrategy[GenerationRequest]:
    """Requests as a body may bring them: with up to four fields that are not as in `plain`."""

    def made(fields: dict[str, Any]) -> GenerationRequest | None:
        try:
            return msgspec.convert(msgspec.to_builtins(plain) | fields, type(plain))
        except msgspec.ValidationError:
            return None

    fields = st.dictionaries(st.sampled_from(plain.__struct_fields__), SOME, max_size=4)
    return fields.map(made).filter(lambda request: request is not None)  # type: ignore[arg-type]


def outcome(call: Callable[[], Any]) -> object:
    try:
        return call()
    except RequestError as error:
        return error.message, error.code, error.param


@given(st.data(), st.sampled_from([CHAT, COMPLETION]))
def test_known_params_are_those_that_would_be_built(
    data: st.DataObject, plain: GenerationRequest
) -> None:
    build: Any = chat_params if plain is CHAT else completion_params
    known = KnownParams(type(plain), build)
    asked = st.tuples(requests_like(plain), st.sampled_from([CARD, WARM]))
    for request, card in data.draw(st.lists(asked, min_size=1, max_size=8)):
        for _ in range(2):
            found = outcome(lambda: known(request, card))  # noqa: B023
            assert found == outcome(lambda: build(request, card))  # noqa: B023
            assert repr(found) == repr(outcome(lambda: build(request, card)))  # noqa: B023


class Spied:
    """`of`, and the names of what was asked of it."""

    def __init__(self, of: object) -> None:
        self._of = of
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._of, name)


@given(st.data(), st.sampled_from([CHAT, COMPLETION]))
def test_params_are_made_of_nothing_that_is_not_looked_up(
    data: st.DataObject, plain: GenerationRequest
) -> None:
    build: Any = chat_params if plain is CHAT else completion_params
    request, card = data.draw(requests_like(plain)), Spied(WARM)
    spied = Spied(request)
    outcome(lambda: build(spied, card))
    assert not spied.read & known_params._APART
    has_lists = any(isinstance(value, list | dict) for value in msgspec.structs.astuple(request))
    assert card.read <= {"defaults", *(["vocab_tokens"] if has_lists else [])}


def test_as_many_params_are_known_as_may_be() -> None:
    built = 0

    def build(request: CompletionRequest, card: ModelCard) -> Any:
        nonlocal built
        built += 1
        return completion_params(request, card)

    known = KnownParams(CompletionRequest, build)
    for n in [*range(1, MAX_KNOWN + 1), 1]:
        asked = CompletionRequest(prompt="", max_tokens=n, seed=n)
        assert known(asked, CARD) == completion_params(asked, CARD)
    assert built == MAX_KNOWN
    for n in (MAX_KNOWN + 1, 1):
        asked = CompletionRequest(prompt="", max_tokens=n)
        assert known(asked, CARD) == completion_params(asked, CARD)
    assert built == MAX_KNOWN + 2
    assert len(known._known) == 2


def test_nothing_of_a_long_body_is_kept() -> None:
    known = KnownParams(CompletionRequest, completion_params)
    asked = CompletionRequest(prompt="", stop="x" * MAX_BODY_BYTES)
    for n_bytes, n_known in ((MAX_BODY_BYTES + 1, 0), (MAX_BODY_BYTES, 1)):
        assert known.for_body(n_bytes)(asked, CARD) == completion_params(asked, CARD)
        assert len(known._known) == n_known


def test_random_ids_differ_and_look_alike() -> None:
    new_id = RandomIds("cmpl-")
    ids = [new_id() for _ in range(1000)]
    assert len({*ids, RandomIds("cmpl-")()}) == 1001
    for each in ids:
        prefix, _, digits = each.partition("-")
        assert (prefix, len(digits), len(bytes.fromhex(digits))) == ("cmpl", 32, 16)


@pytest.fixture
async def lengths() -> AsyncIterator[str]:
    """The address of a server that answers with the length of a body of at most 1000 bytes."""

    async def handle(request: web.Request) -> web.Response:
        body = await read_body(request)
        return web.Response(text=str(len(body)))

    app = web.Application(client_max_size=1000)
    app.router.add_route("*", "/", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def pieces(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize(
    ("sizes", "told"),
    [((0,), "0"), ((1,), "1"), ((1000,), "1000"), ((1001,), None), ((400, 600), "1000")],
)
async def test_a_body_is_read_whether_it_is_there_or_comes_in_pieces(
    lengths: str, sizes: tuple[int, ...], told: str | None
) -> None:
    bodies: list[Any] = [b"x" * sum(sizes), pieces(*sizes)]
    async with aiohttp.ClientSession() as session:
        for body in bodies:
            async with session.post(lengths, data=body) as answer:
                assert answer.status == (413 if told is None else 200)
                assert told is None or await answer.text() == told
        async with session.get(lengths) as answer:
            assert await answer.text() == "0"


class BrokenLink:
    """It takes one request."""

    name = "broken"

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        if any(isinstance(each, Generate) for each in self.sent) and isinstance(message, Generate):
            raise MemoryError
        self.sent.append(message)


async def test_what_cannot_be_sent_whole_leaves_nothing_open() -> None:
    directory, metrics = ModelDirectory(), GatewayMetrics(CollectorRegistry())
    upstream = Upstream(directory, metrics, timeout_s=5)
    link: Any = BrokenLink()
    upstream._links[link.name] = link
    directory.update(link.name, [engine()])
    params = completion_params(COMPLETION, CARD)
    prompts = [Generate(name, 0, CARD.names[0], Prompt(text="a"), params) for name in ("a", "b")]
    with pytest.raises(MemoryError):
        upstream.open(Generation(2, 1), prompts)
    assert link.sent[1:] == [Cancel("a")]
    assert metrics.requests.ledger().in_flight == 0
    async with asyncio.timeout(5):
        await upstream.drain()
