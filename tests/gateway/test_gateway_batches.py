"""Files and batches by the released openai client, and what befalls them."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_fakes import (
    CARD,
    PIECES,
    Conversation,
    FakeTokenizer,
    Gateway,
    running_gateway,
    say_hello,
    settings_for,
)

from pagemesh.gateway.batches import run, runner
from pagemesh.gateway.batches.batch_store import BatchStore
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import LAST_PRIORITY, Capacity, EngineStats, EngineStatus
from pagemesh.shared.settings import Settings

KEYS = ["sk-one", "sk-two"]
TEXT = "".join(PIECES)
ENDPOINT = "/v1/chat/completions"


@pytest.fixture
def settings(redis_url: str, mesh_name: str, tmp_path: Path) -> Settings:
    limits = {"max_file_bytes": 20_000, "max_files_bytes": 60_000, "batch_concurrency": 8}
    return settings_for(redis_url, mesh_name, api_key=KEYS, files_dir=str(tmp_path), **limits)


def client_of(gateway: Gateway, key: str = KEYS[0]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as client:
        yield client


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


async def started(
    client: openai.AsyncOpenAI, *lines: Any, raw: bytes = b"", **fields: Any
) -> openai.types.Batch:
    content = raw + "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    return await client.batches.create(**{**given, **fields})


async def until(client: openai.AsyncOpenAI, batch_id: str, *statuses: str) -> openai.types.Batch:
    async with asyncio.timeout(20):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in statuses:
                return batch
            await asyncio.sleep(0.05)


def parts_in(folder: Path) -> list[Path]:
    return found_in(folder, "*.part")


def found_in(folder: Path, name: str) -> list[Path]:
    return list(folder.rglob(name))


async def until_so(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def entries(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    return [json.loads(each) for each in text.splitlines()]


async def test_a_batch_from_its_file_to_its_answers(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    lines = [line(f"r{i}") for i in range(5)] + [line("hot", temperature=9)]
    batch = await started(client, *lines, raw=b"\n", metadata={"job": "nightly"})
    assert batch.status in ("validating", "in_progress")
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = await until(client, batch.id, "completed")
    assert done.metadata == {"job": "nightly"}
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    answers = await entries(client, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(5)]
    assert len({answer["id"] for answer in answers}) == 5
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    (refused,) = await entries(client, done.error_file_id)
    assert refused["custom_id"] == "hot"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    priorities = {talk.generate.priority for talk in tokenizer.talks.values()}
    assert priorities == {LAST_PRIORITY}


async def test_files_are_kept_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 8
    files = [
        await client.files.create(file=(f"{i}.bin", content), purpose="user_data") for i in range(3)
    ]
    kept = await client.files.create(
        file=("in.jsonl", b"{}"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (kept.bytes, kept.filename, kept.purpose) == (2, "in.jsonl", "batch")
    assert kept.expires_at == kept.created_at + 3600
    listed = [file.id async for file in client.files.list(limit=2)]
    assert listed == [file.id for file in reversed([*files, kept])]
    page = await client.files.list(purpose="user_data", limit=2, order="asc")
    assert [file.id for file in page.data] == [file.id for file in files[:2]]
    assert page.has_more
    assert (await client.files.retrieve(files[1].id)) == files[1]
    assert (await client.files.content(files[1].id)).content == content
    assert (await client.files.delete(files[1].id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(files[1].id)


async def test_what_is_no_good_file_is_refused_by_name(
    client: openai.AsyncOpenAI, gateway: Gateway, tmp_path: Path
) -> None:
    async def refusal(name: str, size: int, **fields: Any) -> str:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=(name, b"x" * size), **fields)
        assert refused.value.status_code in (400, 413)
        return f"{refused.value.status_code} {refused.value.param}"

    assert await refusal("a", 9, purpose="fine-tune") == "400 purpose"
    assert await refusal("a", 9, purpose="nonsense") == "400 purpose"  # type: ignore[arg-type]
    assert await refusal("a", 0, purpose="batch") == "400 file"
    assert await refusal("a", 20_001, purpose="batch") == "413 file"
    life = {"anchor": "created_at", "seconds": 9}
    assert await refusal("a", 9, purpose="batch", expires_after=life) == "400 expires_after.seconds"
    for _ in range(2):
        await client.files.create(file=("a", b"x" * 18_000), purpose="batch")
    assert await refusal("a", 18_000, purpose="batch") == "413 file"
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for form in ("multipart/form-data", "multipart/form-data; boundary=a", "text/plain"):
        no_header = b'--a\r\nContent-Disposition: form-data; name="\x1b"\r\n\r\nx\r\n--a--'
        for body in (b"", b"--a\r\n", b"--a\r\n\r\nx\r\n--a--", no_header, b"x" * 70_000):
            async with gateway.session.post(
                f"{gateway.url}/v1/files", data=body, headers={**headers, "Content-Type": form}
            ) as answer:
                assert answer.status == 400, (form, body[:9], await answer.text())
    odd = (b'name="_charset_"\r\n\r\n' + b"x" * 40, b'name="\xff"\r\n\r\n' + b"x" * 2000)
    for part in odd:
        body = b"--a\r\nContent-Disposition: form-data; %b\r\n--a--\r\n" % part
        status, _ = await _upload(gateway, body)
        assert status == 400
    named = b'--a\r\nContent-Disposition: form-data; name="file"; filename="\xff"\r\n\r\nx\r\n'
    purpose = b'--a\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--a--\r\n'
    status, kept = await _upload(gateway, named + purpose)
    assert (status, kept["filename"]) == (200, "\ufffd")
    assert not parts_in(tmp_path)


async def _upload(gateway: Gateway, body: Any) -> tuple[int, Any]:
    headers = {
        "Authorization": f"Bearer {KEYS[1]}",
        "Content-Type": "multipart/form-data; boundary=a",
    }
    url = f"{gateway.url}/v1/files"
    async with gateway.session.post(url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_files_that_come_at_once_have_the_room_of_all(
    gateway: Gateway, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    n_coming = 0
    all_come = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal n_coming
        yield b'--a\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--a\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        n_coming += 1
        if n_coming == 6:
            all_come.set()
        await all_come.wait()
        yield b"x" * 18_000 + b"\r\n--a--\r\n"

    answers = await asyncio.gather(*(_upload(gateway, body()) for _ in range(6)))
    statuses = [status for status, _ in answers]
    assert {*statuses} <= {200, 413}
    assert statuses.count(200) <= 3
    assert not parts_in(tmp_path)


async def test_a_folder_that_cannot_be_used_costs_files_alone(
    redis_url: str, mesh_name: str, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = settings_for(redis_url, mesh_name, files_dir=str(tmp_path / "file" / "folder"))
    async with running_gateway(settings) as gateway, client_of(gateway) as client:
        await gateway.until_ready()
        with pytest.raises(openai.InternalServerError, match="--files-dir"):
            await client.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="--files-dir"):
            await client.batches.list()
        answer = await client.completions.create(model="tiny", prompt="a")
        assert answer.choices[0].text == TEXT


async def test_another_key_finds_nothing(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    batch = await started(client, line("r1"))
    async with client_of(gateway, KEYS[1]) as other:
        assert [each async for each in other.files.list()] == []
        assert [each async for each in other.batches.list()] == []
        calls: list[Any] = [
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(
                input_file_id=batch.input_file_id,
                endpoint=ENDPOINT,
                completion_window="24h",
            ),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]


async def test_bad_lines_fail_a_batch_by_number(client: openai.AsyncOpenAI) -> None:
    lines = [
        line("a"),
        line("a"),
        {**line("b"), "method": "GET"},
        {**line("c"), "url": "/v1/completions"},
        {**line("d"), "body": "text"},
        {"custom_id": "e"},
        line("f", stream=True),
    ]
    batch = await started(client, *lines, raw=b"not json\n\n")
    failed = await until(client, batch.id, "failed")
    assert failed.errors is not None
    found = [(each.line, each.code, each.param) for each in failed.errors.data or []]
    assert found == [
        (1, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_method", "method"),
        (6, "invalid_url", "url"),
        (7, "invalid_type", "body"),
        (8, "missing_required_parameter", "method"),
        (9, "invalid_value", "body.stream"),
    ]
    assert failed.output_file_id is None
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        await client.batches.cancel(batch.id)


async def test_bad_batches_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    async def param(**fields: Any) -> str | None:
        with pytest.raises(openai.BadRequestError) as refused:
            await started(client, line("a"), **fields)
        return refused.value.param

    assert await param(endpoint="/v1/models") == "endpoint"
    assert await param(completion_window="1h") == "completion_window"
    assert await param(metadata={"k" * 65: "v"}) == "metadata"
    assert await param(metadata={str(i): "v" for i in range(17)}) == "metadata"
    life = {"anchor": "last_active_at", "seconds": 3600}
    assert await param(output_expires_after=life) == "expires_after.anchor"
    other = await client.files.create(file=("a", b"x"), purpose="vision")
    assert await param(input_file_id=other.id) == "input_file_id"


async def test_cancelling_frees_the_engine_and_keeps_what_is_answered(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def answer_one(talk: Conversation) -> None:
        if (talk.generate.prompt.messages or [])[0]["content"] == "quick":
            await say_hello(talk)

    tokenizer.script = answer_one
    batch = await started(client, line("slow-1"), line("quick"), line("slow-2"))
    await until_so(lambda: len(tokenizer.talks) == 3)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    open_talks = [talk for talk in tokenizer.talks.values() if not _is_quick(talk)]
    async with asyncio.timeout(1):
        for talk in open_talks:
            await talk.cancelled.wait()
    done = await until(client, batch.id, "cancelled")
    assert None not in (done.cancelling_at, done.cancelled_at)
    assert done.error_file_id is None
    assert [each["custom_id"] for each in await entries(client, done.output_file_id)] == ["quick"]


def _is_quick(talk: Conversation) -> bool:
    return bool((talk.generate.prompt.messages or [])[0]["content"] == "quick")


async def test_what_is_out_makes_room_for_others_and_is_asked_again(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    """Of eight a quarter stays."""

    def wide(running: int) -> EngineStatus:
        capacity = Capacity(64, 64, 64, 100, "cpu")
        return EngineStatus("engine-1", CARD, capacity, EngineStats(running))

    go_on = asyncio.Event()

    async def wait(talk: Conversation) -> None:
        await go_on.wait()
        if not talk.cancelled.is_set():
            await say_hello(talk)

    tokenizer.script = wait
    tokenizer.push([wide(running=0)])
    names = [f"r{i}" for i in range(8)]
    batch = await started(client, *map(line, names))
    await until_so(lambda: len(tokenizer.talks) == 8)
    asked = list(tokenizer.talks.values())
    tokenizer.push([wide(running=10)])
    await until_so(lambda: sum(talk.cancelled.is_set() for talk in asked) == 6)
    assert not any(talk.cancelled.is_set() for talk in asked[:2])
    go_on.set()
    tokenizer.push([wide(running=0)])
    done = await until(client, batch.id, "completed")
    found = [each["custom_id"] for each in await entries(client, done.output_file_id)]
    assert found == names
    assert len(tokenizer.talks) == 8 + 6


async def test_no_answer_is_lost_that_is_withdrawn_while_the_disk_is_slow(
    client: openai.AsyncOpenAI,
    tokenizer: FakeTokenizer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append, begun, go_on = BatchStore.append, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        go_on.wait(10)
        append(*args)

    monkeypatch.setattr(BatchStore, "append", slow)
    names = [f"r{i}" for i in range(4)]
    batch = await started(client, *map(line, names))
    await until_so(lambda: begun.is_set() and len(tokenizer.talks) == 2)
    await asyncio.sleep(0.1)
    slots = gateway.core._batches._runner._means.slots
    for task in list(slots._out):
        task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    done = await until(client, batch.id, "completed")
    assert done.request_counts is not None
    assert done.request_counts.completed == 4
    found = [each["custom_id"] for each in await entries(client, done.output_file_id)]
    assert found == names


async def test_what_cannot_be_written_is_asked_again(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, faults = BatchStore.append, [OSError(errno.ENOSPC, "No space left on device")]

    def full_once(*args: Any) -> None:
        if faults:
            raise faults.pop()
        append(*args)

    monkeypatch.setattr(BatchStore, "append", full_once)
    monkeypatch.setattr(runner, "RETRY_S", 0.1)
    batch = await started(client, line("a"), line("b"))
    done = await until(client, batch.id, "completed")
    assert done.request_counts is not None
    assert done.request_counts.completed == 2


async def test_a_batch_that_cannot_be_read_hides_no_other(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    batch = await started(client, line("a"))
    await until(client, batch.id, "completed")
    folder = next(each for each in found_in(tmp_path, batch.id) if each.is_dir()).parent
    (folder / f"batch_{'0' * 25}").mkdir()
    (folder / f"batch_{'1' * 25}").mkdir()
    (folder / f"batch_{'1' * 25}" / "state-1.json").write_text('{"of": "another version"}')
    assert [each.id for each in (await client.batches.list()).data] == [batch.id]


async def test_what_is_refused_for_the_moment_is_tried_again(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def refuse_first(talk: Conversation) -> None:
        if len(tokenizer.talks) == 1:
            talk.fail(RequestError("full", status=429))
        else:
            await say_hello(talk)

    tokenizer.script = refuse_first
    batch = await started(client, line("r1"))
    done = await until(client, batch.id, "completed")
    assert len(await entries(client, done.output_file_id)) == 1
    assert len(tokenizer.talks) == 2


async def test_no_pause_is_too_long_for_a_batch(
    client: openai.AsyncOpenAI,
    gateway: Gateway,
    tokenizer: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(run, "LONGEST_WAIT_S", 0.01)
    n_pauses = run.MAX_UNAVAILABLE + 1
    pause = gateway.core.backend.pause

    async def answer_at_last(talk: Conversation) -> None:
        if len(tokenizer.talks) > n_pauses:
            await say_hello(talk)

    tokenizer.script = answer_at_last
    batch = await started(client, line("r0"))
    for n_asked in range(1, n_pauses + 1):
        await until_so(lambda n_asked=n_asked: len(tokenizer.talks) == n_asked)
        await pause.change("abort")
        await list(tokenizer.talks.values())[-1].cancelled.wait()
        await pause.change(None)
    done = await until(client, batch.id, "completed")
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
    assert len(tokenizer.talks) == n_pauses + 1


async def test_another_gateway_goes_on_where_one_stopped(
    settings: Settings, tokenizer: FakeTokenizer
) -> None:
    asked: list[str] = []
    go_on = asyncio.Event()

    async def answer_two(talk: Conversation) -> None:
        asked.append((talk.generate.prompt.messages or [])[0]["content"])
        if len(asked) <= 2 or go_on.is_set():
            await say_hello(talk)

    tokenizer.script = answer_two
    names = [f"r{i}" for i in range(4)]
    async with running_gateway(settings) as first, client_of(first) as client:
        await first.until_ready()
        batch = await started(client, *map(line, names))
        await until_so(lambda: len(asked) == 4)
    answered, open_ones = asked[:2], asked[2:]
    go_on.set()
    async with running_gateway(settings) as second, client_of(second) as client:
        await second.until_ready()
        done = await until(client, batch.id, "completed")
        found = [each["custom_id"] for each in await entries(client, done.output_file_id)]
    assert found == names
    assert sorted(asked[4:]) == sorted(open_ones)
    assert not set(answered) & set(asked[4:])
