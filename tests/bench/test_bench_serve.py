"""`pagemesh bench serve` from the command line, against scripted servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench_command import SMALL, Bench
from scripted_server import Play, Reply, ScriptedServer, obedient, text

from pagemesh import cli


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


async def test_random_prompts_travel_as_ids(bench: Bench) -> None:
    server = ScriptedServer()
    ran = await bench(server, *SMALL, "--num-prompts", "5", "--ignore-eos", "--num-warmups", "0")
    assert ran.exit_code == 0
    assert len(server.streamed) == 5
    for body in server.streamed:
        assert len(body["prompt"]) == 6
        assert body["model"] == "scripted"
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0.0, True)
        assert body["stream_options"] == {"include_usage": True}
    expected = {
        "completed": 5,
        "failed": 0,
        "total_input_tokens": 30,
        "total_output_tokens": 15,
        "output_events": 15,
        "output_tokens_from": "usage",
        "request_rate": "inf",
        "model": "scripted",
    }
    assert ran.figures.items() >= expected.items()
    assert "Successful requests:                                     5" in ran.out
    assert "5/5" in ran.err  # the progress bar


async def test_the_same_seed_sends_the_same(bench: Bench) -> None:
    first, second, other = ScriptedServer(), ScriptedServer(), ScriptedServer()
    flags = (*SMALL, "--num-prompts", "3", "--max-concurrency", "1")
    await bench(first, *flags)
    await bench(second, *flags)
    await bench(other, *flags, "--seed", "1")
    assert first.bodies == second.bodies
    assert first.streamed[0] == other.streamed[0]  # the warm-up
    assert first.streamed[1:] != other.streamed[1:]


async def test_a_server_without_ids_gets_text_and_the_report_says_so(bench: Bench) -> None:
    server = ScriptedServer(takes_ids=False)
    ran = await bench(server, *SMALL, "--num-prompts", "2")
    assert ran.exit_code == 0
    assert all(len(body["prompt"].split()) == 6 for body in server.streamed[1:])
    assert "about a token a word (HTTP 400: prompt must be a string)" in ran.out


async def test_chat_sends_messages(bench: Bench) -> None:
    server = ScriptedServer()
    ran = await bench(server, *SMALL, "--num-prompts", "2", "--endpoint", "chat")
    assert ran.exit_code == 0
    assert all(body["messages"][0]["role"] == "user" for body in server.bodies)
    assert ran.figures["total_input_tokens"] == 14  # as the server counts them


async def test_ids_stay_below_the_vocabulary_the_server_tells(bench: Bench) -> None:
    server = ScriptedServer(models={"data": [{"id": "m", "meta": {"n_vocab": 11}}]})
    ran = await bench(server, "--random-input-len", "200", "--num-prompts", "2")
    assert ran.figures["vocab_size"] == 11
    drawn = {token_id for body in server.streamed for token_id in body["prompt"]}
    assert drawn == set(range(11))


async def test_shared_prefixes(bench: Bench) -> None:
    server = ScriptedServer()
    flags = {
        "--dataset-name": "shared-prefix",
        "--num-prompts": "4",
        "--prefix-repetition-prefix-len": "20",
        "--prefix-repetition-suffix-len": "5",
        "--prefix-repetition-num-prefixes": "1",
        "--prefix-repetition-output-len": "2",
    }
    await bench(server, *(part for pair in flags.items() for part in pair))
    prompts = [body["prompt"] for body in server.streamed[1:]]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4


async def test_a_file_of_requests(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "Hi", "max_tokens": 2}\n{"prompt": "Ho"}\n')
    server = ScriptedServer()
    flags = ("--dataset-name", "file", "--dataset-path", str(path), "--file-output-len", "4")
    ran = await bench(server, *flags, "--max-concurrency", "1")
    sent = [(body["prompt"], body["max_tokens"]) for body in server.streamed[1:]]
    assert sent == [("Hi", 2), ("Ho", 4)]
    assert ran.figures["total_output_tokens"] == 6


async def test_several_client_processes_share_the_work(bench: Bench) -> None:
    server = ScriptedServer()
    flags = ("--num-prompts", "7", "--clients", "2", "--max-concurrency", "3")
    ran = await bench(server, *SMALL, *flags, "--request-rate", "1000")
    assert ran.exit_code == 0
    assert len(server.streamed) == 1 + 7
    assert ran.figures["completed"] == 7
    assert ran.figures["client"]["processes"] == 2
    assert "7/7" in ran.err


async def test_goodput_counts_against_the_limits(bench: Bench) -> None:
    every = await bench(ScriptedServer(), *SMALL, "--goodput", "ttft:1e9", "tpot:1e9", "e2el:1e9")
    assert every.figures["request_goodput"] == every.figures["request_throughput"]
    none = await bench(ScriptedServer(), *SMALL, "--goodput", "e2el:0")
    assert none.figures["request_goodput"] == 0


async def test_the_key_is_sent_and_kept_out_of_the_figures(bench: Bench) -> None:
    server = ScriptedServer(api_key="hidden")
    ran = await bench(server, *SMALL, "--num-prompts", "2", "--api-key", "hidden")
    assert ran.exit_code == 0
    assert "hidden" not in json.dumps(ran.figures) + ran.out


async def test_more_request_fields_win(bench: Bench) -> None:
    server = ScriptedServer()
    await bench(server, *SMALL, "--num-prompts", "1", "--extra-body", '{"top_k": 5, "seed": 1}')
    assert all((body["top_k"], body["seed"]) == (5, 1) for body in server.streamed)


async def test_a_server_without_a_list_needs_a_model_name(bench: Bench) -> None:
    ran = await bench(ScriptedServer(models={}), *SMALL)
    assert ran.exit_code == cli.EXIT_STARTUP
    assert "names no model; give one with --model" in ran.err
    named = await bench(ScriptedServer(models={}), *SMALL, "--model", "mine", "--num-prompts", "1")
    assert named.figures["model"] == "mine"


async def broken(_: Reply) -> web.StreamResponse:
    raise web.HTTPInternalServerError(text="broken")


def after(n_good: int, play: Play) -> Play:
    """Obedient for the first requests, then `play`."""
    answered = 0

    async def either(reply: Reply) -> web.StreamResponse:
        nonlocal answered
        answered += 1
        return await (obedient if answered <= n_good else play)(reply)

    return either


async def cut(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send(text("a"))
    return reply.cut()


async def error_event(reply: Reply) -> web.StreamResponse:
    await reply.start()
    await reply.send({"error": {"message": "the engine is lost"}})
    return await reply.end()


@pytest.mark.parametrize(
    ("play", "kind", "message"),
    [
        (broken, "HTTP 500", "broken"),
        (cut, "cut stream", ""),
        (error_event, "error event", "the engine is lost"),
    ],
)
async def test_failures_are_counted_and_end_in_exit_code_1(
    bench: Bench, play: Play, kind: str, message: str
) -> None:
    n_warmups, n_good = 1, 2
    server = ScriptedServer(after(n_warmups + n_good, play))
    ran = await bench(server, *SMALL, "--num-prompts", "6")
    assert ran.exit_code == 1
    assert (ran.figures["completed"], ran.figures["failed"]) == (2, 4)
    assert ran.figures["total_output_tokens"] == 6
    failures: dict[str, Any] = ran.figures["failures"]
    assert set(failures) == {kind}
    assert message in failures[kind]["first_message"]
    assert f"4 requests failed: {kind}" in ran.out


async def test_a_server_that_cannot_answer_at_all_is_one_line(bench: Bench) -> None:
    ran = await bench(ScriptedServer(broken), *SMALL)
    assert ran.exit_code == cli.EXIT_STARTUP
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].endswith("failed: HTTP 500: broken")
    assert ran.figures == {}


async def test_a_missing_key_is_one_line(bench: Bench) -> None:
    ran = await bench(ScriptedServer(api_key="hidden"), *SMALL)
    assert ran.exit_code == cli.EXIT_STARTUP
    assert "asks for a key: give one with --api-key" in ran.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num-prompt", "1"], "the nearest is --num-prompts"),
        (["--num-prompts", "0"], "'0' is not a whole number from 1"),
        (["--request-rate", "0"], "'0' is not a number above 0"),
        (["--request-rate", "fast"], "'fast' is not a number above 0"),
        (["--random-range-ratio", "1"], "'1' is not in [0, 1)"),
        (["--goodput", "itl:5"], "'itl:5' is not one of ttft:MS tpot:MS e2el:MS"),
        (["--goodput", "ttft:"], "'ttft:' has no limit in ms"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--extra-body", "{"], "'{' is not JSON"),
        (["--json", "/nowhere/x.json"], "'/nowhere/x.json' cannot be written"),
        (["--dataset-name", "file"], "--dataset-name file and --dataset-path go together"),
        (["--dataset-path", "x"], "--dataset-name file and --dataset-path go together"),
        (["--base-url", "http://127.0.0.1:1"], "no OpenAI-style server answers at http://127.0"),
    ],
)
def test_what_cannot_work_is_one_line(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *flags]) == cli.EXIT_STARTUP
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
