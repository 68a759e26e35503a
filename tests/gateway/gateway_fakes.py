"""A scripted tokenizer service on a real link, and the real gateway above it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from pagemesh.gateway.service import GatewayService
from pagemesh.shared.errors import LinkClosed, RequestError
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.messages import (
    Accepted,
    Begun,
    CacheReset,
    Cancel,
    Capacity,
    Delta,
    Deltas,
    Detokenize,
    Detokenized,
    Engines,
    EngineStats,
    EngineStatus,
    Failed,
    Generate,
    Hello,
    ModelCard,
    Prompt,
    Render,
    Rendered,
    ResetCache,
    Tokenize,
    Tokenized,
    TokenLogprob,
)
from pagemesh.shared.registry import Instance, Registry
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import GatewaySettings, MeshSettings, Settings
from pagemesh.shared.wire import PROTOCOL, pack_ids, unpack_ids

VOCAB_TOKENS = 1000
MAX_MODEL_LEN = 4096
CARD = ModelCard(
    names=["tiny", "tiny-alias"],
    vocab_tokens=VOCAB_TOKENS,
    max_model_len=MAX_MODEL_LEN,
    block_tokens=16,
    dtype="float32",
    eos_token_ids=[2],
    bos_token_id=1,
    fingerprint="f",
    created_s=7,
    hidden_size=8,
)
CAPACITY = Capacity(64, 8, 64, 100, "cpu")
PIECES = ["Hello", " wörld", " 😀", "!"]


def engine(engine_id: str = "engine-1", card: ModelCard = CARD) -> EngineStatus:
    return EngineStatus(engine_id, card, CAPACITY, EngineStats(1, 2, 0.25, 3))


def prompt_ids(prompt: Prompt) -> list[int]:
    """One id per character, as good as any tokenizer here."""
    if prompt.token_ids is not None:
        return unpack_ids(prompt.token_ids)
    text = prompt.text
    if text is None:
        text = "".join(str(message["content"]) for message in prompt.messages or [])
    return [ord(char) % VOCAB_TOKENS for char in text]


def token_text(token_id: int) -> str:
    return chr(token_id)


def logprob_row(token_id: int, text: str, top: int) -> TokenLogprob:
    alternatives = [(token_id, text, text.encode(), -0.5, 1), (9, "nine", b"nine", -1.5, 2)]
    return TokenLogprob(token_id, text, text.encode(), -0.5, 1, alternatives[:top])


class Conversation:
    """One Generate as the fake sees it. Everything sent is explicit."""

    def __init__(self, link: Link, generate: Generate) -> None:
        self.link = link
        self.generate = generate
        self.cancelled = asyncio.Event()

    def accept(self) -> None:
        ids = prompt_ids(self.generate.prompt)
        text = self.generate.prompt.text or "".join(map(token_text, ids))
        wanted = text if self.generate.want_prompt_text else None
        self.link.send(Accepted(self.generate.request_id, pack_ids(ids), wanted))

    def begin(self, choice: int = 0, queue_s: float = 0.5, prefill_s: float = 0.25) -> None:
        begun = Begun(self.generate.request_id, choice, "engine-1", 2, queue_s, prefill_s)
        self.link.send(Deltas([], [begun]))

    def delta(self, text: str, ids: list[int], choice: int = 0, **fields: Any) -> None:
        row = Delta(self.generate.request_id, choice, text, pack_ids(ids), **fields)
        self.link.send(Deltas([row]))

    def fail(self, error: RequestError) -> None:
        self.link.send(Failed(self.generate.request_id, error.to_wire()))


Script = Callable[[Conversation], Awaitable[None]]


async def say_hello(talk: Conversation) -> None:
    """Accept, then one delta per piece and choice; choice i marks its text with i."""
    params = talk.generate.params
    talk.accept()
    pieces = PIECES[: params.max_tokens]
    for choice in range(params.n):
        talk.begin(choice)
        mark = str(choice) if choice else ""
        for i, piece in enumerate(pieces):
            _say(talk, choice, i, piece + mark, last=i == len(pieces) - 1)
        if not pieces:
            _say(talk, choice, 0, "", last=True)


def _say(talk: Conversation, choice: int, i: int, piece: str, *, last: bool) -> None:
    params = talk.generate.params
    ids = [10 + i] if piece else []
    fields: dict[str, Any] = {"cached_tokens": 2}
    if params.logprobs is not None:
        fields["logprobs"] = [logprob_row(token, piece, params.logprobs) for token in ids]
    if params.prompt_logprobs is not None and choice == 0 and i == 0:
        rows = [
            logprob_row(token, token_text(token), params.prompt_logprobs)
            for token in prompt_ids(talk.generate.prompt)[1:]
        ]
        fields["prompt_logprobs"] = [None, *rows]
    if last:
        fields["finish_reason"] = "stop" if params.stop else "length"
        fields["stop_reason"] = params.stop[0] if params.stop else None
    talk.delta(piece, ids, choice, **fields)


class FakeTokenizer:
    """Answers by `script` when there is one; otherwise tests take conversations from `asked`."""

    def __init__(self, name: str, script: Script | None) -> None:
        self.name = name
        self.script = script
        self.engines = [engine()]
        self.asked: asyncio.Queue[Conversation] = asyncio.Queue()
        self.links: list[Link] = []
        self.talks: dict[str, Conversation] = {}
        self.questions: list[Tokenize] = []
        self.reset: list[str] = []
        self.mute_questions = False
        self.muted = asyncio.Event()
        self.withdrawn: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve_link(self, request: web.Request) -> web.WebSocketResponse:
        link, response = await accept(
            request, Hello(PROTOCOL, "tokenizer", self.name, 1, "", self.engines)
        )
        assert link is not None
        self.links.append(link)
        try:
            async for message in link:
                self._receive(link, message)
        finally:
            await link.close()
        return response

    def push(
        self, engines: list[EngineStatus], *, draining: bool = False, names: list[str] | None = None
    ) -> None:
        for link in self.links:
            with contextlib.suppress(LinkClosed):
                link.send(Engines(engines, draining, names or []))

    async def hang_up(self) -> None:
        """Lose every link at once, as a crash would."""
        await asyncio.gather(*(link.close() for link in self.links))

    def _receive(self, link: Link, message: object) -> None:
        match message:
            case Generate():
                self._generate(Conversation(link, message))
            case Cancel(request_id) if request_id in self.talks:
                self.talks[request_id].cancelled.set()
            case Cancel(request_id):
                self.withdrawn.put_nowait(request_id)
            case Tokenize() | Detokenize() if self.mute_questions:
                self.muted.set()
            case Tokenize(request_id, _, prompt, want_strs):
                self.questions.append(message)
                ids = prompt_ids(prompt)
                strs = [token_text(i) for i in ids] if want_strs else None
                link.send(Tokenized(request_id, pack_ids(ids), strs, MAX_MODEL_LEN))
            case ResetCache(request_id, model):
                self.reset.append(model)
                link.send(CacheReset(request_id, [each.engine_id for each in self.engines]))
            case Render(generate):
                ids = pack_ids(prompt_ids(generate.prompt))
                text = "".join(map(token_text, unpack_ids(ids)))
                link.send(Rendered(generate.request_id, ids, text, generate.params))
            case Detokenize(request_id, _, ids):
                link.send(Detokenized(request_id, "".join(map(token_text, unpack_ids(ids)))))

    def _generate(self, talk: Conversation) -> None:
        self.talks[talk.generate.request_id] = talk
        if self.script is None:
            self.asked.put_nowait(talk)
            return
        task = asyncio.create_task(self.script(talk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@asynccontextmanager
async def fake_tokenizer(
    settings: Settings, name: str = "tokenizer-1", script: Script | None = None
) -> AsyncIterator[FakeTokenizer]:
    """Listening and announced."""
    fake = FakeTokenizer(name, script)
    app = web.Application()
    app.router.add_get(LINK_PATH, fake.serve_link)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    host, port = runner.addresses[0][:2]
    beat = asyncio.create_task(registry.announce(Instance("tokenizer", name, f"{host}:{port}", 1)))
    try:
        yield fake
    finally:
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)
        await fake.hang_up()
        await runner.cleanup()
        await registry.close()


class Gateway:
    """A running gateway. `core` lets tests look at, and wind, its insides."""

    def __init__(self, url: str, core: GatewayService, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.core = core
        self.session = session

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def post_raw(self, path: str, body: bytes) -> tuple[int, Any]:
        async with self.session.post(self.url + path, data=body) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def until_ready(self, *, ready: bool = True) -> None:
        async with asyncio.timeout(10):
            while (self.core.not_ready() is None) is not ready:
                await self.get("/ready")


class Tls(NamedTuple):
    """Both sides of one certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@asynccontextmanager
async def running_gateway(settings: Settings, tls: Tls | None = None) -> AsyncIterator[Gateway]:
    """The real shell on a free port, until the block ends."""
    built: asyncio.Future[tuple[str, GatewayService]] = asyncio.Future()

    def build(runtime: Runtime) -> GatewayService:
        core = GatewayService(runtime)
        built.set_result((runtime.instance_id, core))
        return core

    running = asyncio.create_task(
        serve(
            "gateway",
            settings,
            build,
            host="127.0.0.1",
            port=0,
            tls=tls and tls.server,
        )
    )
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    try:
        instance_id, core = await built
        address = await _address_of(instance_id, registry)
        connector = aiohttp.TCPConnector(ssl=tls.client if tls else True)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Gateway(f"http{'s' if tls else ''}://{address}", core, session)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await registry.close()


async def _address_of(instance_id: str, registry: Registry) -> str:
    async with aclosing(registry.watch("gateway")) as watch:
        async for instances in watch:
            for instance in instances:
                if instance.instance_id == instance_id:
                    return instance.address
    raise AssertionError("the watch ended")


def settings_for(redis_url: str, mesh_name: str, **gateway: Any) -> Settings:
    mesh = MeshSettings(redis_url=redis_url, mesh_name=mesh_name, drain_timeout_s=2.0)
    defaults = GatewaySettings(request_timeout_s=5.0, seed=1)
    return Settings(mesh=mesh, gateway=replace(defaults, **gateway))


async def read_events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of each event until the stream ends; comments are left out."""
    text = (await response.read()).decode()
    events = [block for block in text.split("\n\n") if block]
    return [block.removeprefix("data: ") for block in events if not block.startswith(":")]
