"""The first five minutes: a streamed answer through the real mesh."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import aiohttp
import openai
import pytest
from mesh_process import SERVICES, MeshProcess, wait_until

pytestmark = pytest.mark.mesh
MODEL = "smollm2-135m-instruct"
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def test_the_pasted_curl_streams_an_answer(mesh: MeshProcess) -> None:
    command = ["curl", "-sN", f"{mesh.base_url}/v1/chat/completions"]
    body = json.dumps({**QUESTION, "stream": True})
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "Paris" in text
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_openai_client_streams_what_it_gets_whole(mesh: MeshProcess) -> None:
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**QUESTION)
        with client.chat.completions.create(**QUESTION, stream=True) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole.choices[0].message.content == "".join(pieces)
    assert len(pieces) > 2


async def test_every_service_is_alive_ready_and_measured(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession(mesh.base_url) as session:
        for path in ("/health", "/ready"):
            async with session.get(path) as answer:
                assert answer.status == 200
        async with session.get("/metrics") as answer:
            assert "vllm:gpu_cache_usage_perc{" in await answer.text()


def test_each_service_is_a_process_named_in_its_command_line(mesh: MeshProcess) -> None:
    for name in (*SERVICES, "valkey"):
        assert mesh.child(name).is_running()


def test_every_log_line_is_json(mesh: MeshProcess) -> None:
    lines = log_lines(mesh)
    assert {line["service"] for line in lines} >= set(SERVICES)
    assert all("event" in line and "level" in line for line in lines)


def test_a_request_keeps_its_id_across_services(mesh: MeshProcess) -> None:
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client:
        request_id = client.chat.completions.create(**QUESTION).id

    def services() -> set[str]:
        """Those who speak of the request at the default level."""
        lines = [line for line in log_lines(mesh) if line["level"] != "debug"]
        return {line["service"] for line in lines if line.get("request_id") == request_id}

    # The lines travel through pipes; the answer may be quicker.
    wait_until(lambda: services() >= {"gateway", "tokenizer", "scheduler"}, timeout_s=10)


def log_lines(mesh: MeshProcess) -> list[dict[str, Any]]:
    whole = mesh.log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
