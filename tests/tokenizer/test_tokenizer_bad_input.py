"""Bad input and slow neighbours of the tokenizer service cost nobody else anything."""

from __future__ import annotations

import pytest
from conversation import idle, placed, say
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler
from scripts import generate, logprob_row, prompt_logprobs, status_of, tokens
from structlog.testing import capture_logs

from pagemesh.shared import wire
from pagemesh.shared.engine_messages import Lost
from pagemesh.shared.messages import (
    Detokenize,
    Engines,
    Generate,
    ModelCard,
    Prompt,
    Tokenize,
    WireError,
)
from pagemesh.shared.wire import BadFrame, pack_ids
from pagemesh.tokenizer_svc import outbox

STRANGE_CHAT = Prompt(messages=[{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (generate(request_id="bad", model="other"), 404, "model_not_found", "model"),
        (generate("", "bad"), 400, None, "prompt"),
        (generate([100_000], "bad"), 400, None, "prompt"),
        (generate([5] * 5000, "bad"), 400, "context_length_exceeded", "prompt"),
        (generate(request_id="bad", prompt=STRANGE_CHAT), 400, None, "messages"),
    ],
)
async def test_bad_requests_fail_alone(
    gateway: ScriptedGateway,
    scheduler: ScriptedScheduler,
    request_: Generate,
    status: int,
    code: str | None,
    param: str,
) -> None:
    healthy = await placed(gateway, scheduler, generate(request_id="healthy"))
    gateway.ask(request_)
    error = (await gateway.failed("bad")).error
    assert (error.status, error.code, error.param) == (status, code, param)
    assert (await say(gateway, scheduler, healthy, 5)).error is None
    assert scheduler.submits.empty()


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (Tokenize("bad", "other", Prompt(text="x")), 404),
        (Detokenize("bad", "other", pack_ids([5])), 404),
        (Detokenize("bad", "small", pack_ids([-5])), 400),
        (Tokenize("bad", "small", Prompt(messages=[])), 400),
    ],
)
async def test_bad_tokenize_requests_are_answered(
    gateway: ScriptedGateway, message: Tokenize | Detokenize, status: int
) -> None:
    gateway.ask(message)
    assert (await gateway.failed("bad")).error.status == status


async def test_the_engines_first_refusal_ends_the_whole_request(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    first = await placed(gateway, scheduler, generate(n=3))
    others = [await scheduler.submits.get() for _ in range(2)]
    error = WireError(429, "queue_full", None, "too many wait")
    with capture_logs() as lines:
        scheduler.send(tokens({others[0].key: [5]}))
        scheduler.send(tokens(failed=[(first.key, error), (others[0].key, error)]))
        scheduler.send(tokens(failed=[(others[1].key, error)]))
        assert (await gateway.delta("r1")).choice == others[0].choice
        assert (await gateway.failed("r1")).error == error
        end = await scheduler.ends.get()
        await idle(gateway)
    assert (end.keys, end.reason) == ([others[1].key], "abort")
    assert gateway.is_silent("r1")
    [line] = lines
    assert (line["event"], line["request_id"], line["status"]) == ("request_failed", "r1", 429)


async def test_a_placement_that_crashes_ends_its_request(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = await placed(gateway, scheduler, generate([5] * 1000))
    with capture_logs() as lines:
        scheduler.send(Lost("engine-1", [submit.key]))
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)  # less than its prompt
        error = (await gateway.failed("r1")).error
    assert (error.status, error.message) == (500, "internal error")
    [crash] = [line for line in lines if line["event"] == "request_crashed"]
    assert isinstance(crash["exc_info"], BadFrame)


async def test_large_prompt_logprobs_come_whole(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate([5] * 500, prompt_logprobs=64))
    rows = [[(at % 300, -1.0)] * 65 for at in range(1, 500)]
    chunk = prompt_logprobs(submit.key, 1, rows, [1] * 499)
    scheduler.send(tokens({submit.key: [5]}, prompt_logprobs=[chunk]))
    scored = (await gateway.delta("r1")).prompt_logprobs
    assert scored is not None
    assert [entry and (entry.token_id, len(entry.top)) for entry in scored] == [
        None,
        *((at % 300, 64) for at in range(1, 500)),
    ]


async def test_a_huge_prompt_does_not_stall_a_running_stream(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, card: ModelCard
) -> None:
    scheduler.send(Engines([status_of(card._replace(max_model_len=2**20))]))
    while (await gateway.engines.get()).engines[0].card.max_model_len != 2**20:
        pass
    submit = await placed(gateway, scheduler, generate(max_tokens=4000))
    gateway.ask(generate("hello there, " * 80_000, "huge"))
    n_tokens = 0
    while gateway.is_silent("huge"):
        await say(gateway, scheduler, submit, 5)
        n_tokens += 1
    assert len((await gateway.accepted("huge")).prompt_ids) > 4 * 80_000
    # Encoding a megabyte takes some hundred times as long as a token takes to pass.
    assert n_tokens > 20


async def test_a_gateway_that_does_not_read_loses_only_its_own_link(
    mesh: Mesh,
    gateway: ScriptedGateway,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 100_000)
    healthy = await placed(gateway, scheduler, generate(request_id="healthy"))
    deaf = await mesh.dial("gateway-2")
    deaf.send(generate(request_id="deaf", max_tokens=4000, logprobs=20))
    submit = await scheduler.submits.get()
    row = logprob_row(submit.key, [5] * 21, [-1.0] * 21, 1)
    many = tokens({submit.key: [5] * 200}, logprobs=[row] * 200)
    while scheduler.ends.empty():
        scheduler.send(many)
        await say(gateway, scheduler, healthy, 5)
    assert (await scheduler.ends.get()).keys == [submit.key]
    assert (await say(gateway, scheduler, healthy, 5)).error is None
    await deaf.close()
