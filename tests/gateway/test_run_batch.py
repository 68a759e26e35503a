"""`pagemesh run-batch` against a gateway: what it writes, and what it goes on with."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import PIECES, Conversation, FakeTokenizer, Gateway, say_hello

from pagemesh.batch import client
from pagemesh.batch.cli import run_batch
from pagemesh.shared.errors import RequestError, StartupError


def line(custom_id: str, **fields: Any) -> str:
    body = {"model": "tiny", "prompt": custom_id, **fields}
    url = "/v1/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)


async def ran(gateway: Gateway, source: str, out: Path, *flags: str) -> int:
    path = out.with_name("in.jsonl")
    path.write_text(source)
    argv = ["-i", str(path), "-o", str(out), "--url", gateway.url + "/v1", *flags]
    return await asyncio.to_thread(run_batch, argv)


def entries(text: str) -> dict[str, dict[str, Any]]:
    """By custom id; those without one by line."""
    found = [json.loads(each) for each in text.splitlines() if each.startswith("{")]
    return {each["custom_id"] or each["error"]["line"]: each for each in found}


async def test_bad_lines_and_refusals_stop_nothing(gateway: Gateway, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = line("a") + "not json\n\n" + line("hot", temperature=9) + line("a") + line("b")
    assert await ran(gateway, source, out) == 1
    found = [json.loads(each) for each in out.read_text().splitlines()]
    told = [(each["custom_id"], each["error"] and each["error"]["line"]) for each in found]
    assert sorted(told, key=str) == [("a", 5), ("a", None), ("b", None), ("hot", None), (None, 2)]
    answers = [each["response"] for each in found if each["response"]]
    assert sorted(answer["status_code"] for answer in answers) == [200, 200, 400]
    assert all(answer["request_id"] for answer in answers)
    good = [answer["body"] for answer in answers if answer["status_code"] == 200]
    assert [body["choices"][0]["text"] for body in good] == ["".join(PIECES)] * 2


async def test_what_is_there_is_not_asked_again(
    gateway: Gateway, tokenizer: FakeTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    source = line("a") + "not json\n" + line("b")
    assert await ran(gateway, source, out) == 1
    with pytest.raises(StartupError, match="--resume"):
        await ran(gateway, source, out)
    before = out.read_text()
    # As a process leaves it that is killed while it writes.
    out.write_text(before + before.splitlines()[0][:40])
    tokenizer.talks.clear()
    assert await ran(gateway, source + line("c"), out, "--resume") == 0
    assert out.read_text().startswith(before)
    assert entries(out.read_text()).keys() == {"a", 2, "b", "c"}
    assert len(out.read_text().splitlines()) == 4
    assert [talk.generate.prompt.text for talk in tokenizer.talks.values()] == ["c"]
    assert "1 requests answered, 0 failed, 3 were there already" in capsys.readouterr().err


async def test_pipes_and_moments_of_too_much(
    gateway: Gateway,
    tokenizer: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    async def refuse_first(talk: Conversation) -> None:
        if len(tokenizer.talks) == 1:
            talk.fail(RequestError("full", status=429))
        else:
            await say_hello(talk)

    tokenizer.script = refuse_first
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line("a").encode())))
    argv = ["-i", "-", "-o", "-", "--url", gateway.url]
    assert await asyncio.to_thread(run_batch, argv) == 0
    assert len(tokenizer.talks) == 2
    assert entries(capsysbinary.readouterr().out.decode()).keys() == {"a"}


def test_what_cannot_be_run_is_said_at_once(tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    for argv, said in (
        (["-i", "nowhere.jsonl", "-o", out], "cannot read nowhere.jsonl"),
        (["-i", "-", "-o", "-", "--resume"], "--resume needs an output file"),
        (["-i", "-", "-o", out, "--concurrency", "0"], "--concurrency"),
        (["-o", out], "-i"),
        (["-i", "-", "-o", out, "--cocurrency", "1"], "--concurrency"),
        (["-i", "-", "-o", out, "--url", "localhost:8000"], "--url"),
    ):
        with pytest.raises(StartupError, match=said):
            run_batch(argv)


@pytest.mark.parametrize("text", ["a letter\nof two lines", line("a") + line("b").strip()])
def test_nothing_but_answers_is_gone_on_with(tmp_path: Path, text: str) -> None:
    """The input in the place of the output, for one."""
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    argv = ["-i", str(path), "-o", str(path), "--resume", "--url", "http://127.0.0.1:9"]
    with pytest.raises(StartupError, match=r"in\.jsonl"):
        run_batch(argv)
    assert path.read_text() == text
