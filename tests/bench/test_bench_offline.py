"""Throughput and latency, with a scripted engine and clock, and with a real tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import MAX_TOKENS, VOCAB_TOKENS, save_tiny_llama

from pagemesh import cli
from pagemesh.bench.offline import (
    LatencyFigure,
    OfflineBench,
    Skipped,
    ThroughputRun,
    WrongAnswer,
    latency,
    throughput,
    warmups,
)
from pagemesh.bench.workloads import PREFILL_LENS, PRESETS, STEP_BATCHES, fixed, shared_prefix
from pagemesh.outputs import CompletionOutput, RequestOutput
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import SamplingParams

STEP_S = 0.25
PREFILL_S_PER_TOKEN = 0.0625


class ScriptedEngine:
    """Takes a fixed time a prompt token and a fixed time a decode step, all requests at once."""

    def __init__(self, max_model_len: int = 8448, vocab_tokens: int = 500) -> None:
        self.now_s = 0.0
        self.seen: list[tuple[int, ...]] = []
        self.params: list[SamplingParams] = []
        self.short_by = 0
        self.card = ModelCard(["m"], vocab_tokens, max_model_len, 16, "float32", [1], None, "f", 0)

    def clock(self) -> float:
        return self.now_s

    def generate(
        self, prompts: Any, sampling_params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.seen += map(tuple, ids)
        self.params += sampling_params
        lengths = [params.max_tokens or 0 for params in sampling_params]
        self.now_s += sum(map(len, ids)) * PREFILL_S_PER_TOKEN + (max(lengths) - 1) * STEP_S
        return [
            RequestOutput(str(i), None, [], [CompletionOutput(0, token_ids=[0] * n)])
            for i, n in enumerate(n - self.short_by for n in lengths)
        ]


def bench_of(engine: ScriptedEngine) -> OfflineBench:
    return OfflineBench(engine, engine.clock, show=False)


def test_throughput_counts_prefill_and_decoding() -> None:
    engine = ScriptedEngine()
    draws = {"mine": lambda repeat: fixed(4, 8, 9, repeat)}
    runs = list(throughput(bench_of(engine), draws, 2))
    # 32 prompt tokens and 8 steps after the first token
    assert runs == [ThroughputRun("mine", repeat, 4.0, 4, 32, 36) for repeat in (0, 1)]
    assert isinstance(runs[0], ThroughputRun)
    assert runs[0].output_throughput == 9.0
    assert runs[0].total_token_throughput == 17.0
    assert runs[0].request_throughput == 1.0


def test_latency_parts_the_first_token_from_decoding() -> None:
    figures = list(latency(bench_of(ScriptedEngine()), ["W4", "W5"], 2))
    assert figures == [
        LatencyFigure("W4", "first token", [8_000.0, 8_000.0]),
        LatencyFigure("W4", "a token after it", [250.0, 250.0]),
        LatencyFigure("W5", "first token", [256_000.0, 256_000.0]),
        LatencyFigure("W5", "a token after it", [250.0, 250.0]),
    ]


def test_steps_and_prefills() -> None:
    figures = list(latency(bench_of(ScriptedEngine()), ["STEP", "PREFILL"], 1))
    assert figures == [
        *(LatencyFigure(f"STEP{batch}", "a decode step", [250.0]) for batch in STEP_BATCHES),
        *(LatencyFigure(f"PREFILL{n}", "first token", [n * 62.5]) for n in PREFILL_LENS),
    ]


def test_no_prompt_comes_twice_so_no_cache_helps() -> None:
    engine = ScriptedEngine(vocab_tokens=200_000)
    list(latency(bench_of(engine), ["W4", "W5", "STEP", "PREFILL"], 2))
    assert len(set(engine.seen)) == len(engine.seen)


def test_warm_up_comes_first_and_only_as_far_as_the_model_goes() -> None:
    engine = ScriptedEngine(max_model_len=300)
    OfflineBench(engine, engine.clock, warmups=warmups(gpu=True), show=False)
    assert [len(ids) for ids in engine.seen] == ([64] + [100] * 8 + [200] * 256) * 2
    assert {params.temperature for params in engine.params} == {0.0, 0.6}
    cpu = [(len(one.prompts), one.temperature) for one in warmups(gpu=False)]
    assert cpu == [(1, 0.0), (8, 0.0)]


def test_a_prefix_is_cached_outside_the_measured_time() -> None:
    engine = ScriptedEngine(vocab_tokens=200_000)
    workload = shared_prefix(3, 16, 4, 5, cached=True)
    (run,) = throughput(bench_of(engine), {"mine": lambda repeat: workload}, 1)
    assert isinstance(run, ThroughputRun)
    assert run.seconds == 60 * PREFILL_S_PER_TOKEN + 4 * STEP_S
    assert [len(ids) for ids in engine.seen] == [17, 20, 20, 20]
    assert len({ids[:16] for ids in engine.seen}) == 1


def test_a_workload_that_comes_again_has_other_ids() -> None:
    engine = ScriptedEngine(vocab_tokens=200_000)
    workload = shared_prefix(3, 16, 4, 5, cached=True)
    list(throughput(bench_of(engine), dict.fromkeys("abc", lambda repeat: workload), 1))
    assert len(set(engine.seen)) == len(engine.seen) == 12
    assert len({ids[:16] for ids in engine.seen}) == 3


@pytest.mark.parametrize("name", ["PREFIX", "PREFIX-warm", "PREFIX-none"])
def test_prefix_workloads_have_one_size_and_no_ids_in_common(name: str) -> None:
    workload = PRESETS[name](0)
    assert (len(workload.prompts), workload.longest_tokens) == (200, 2240)
    assert len({tuple(ids) for ids in workload.prompts}) == 200
    n_shared = len({tuple(ids[:2048]) for ids in workload.prompts})
    assert n_shared == (200 if name == "PREFIX-none" else 1)
    assert workload.cached == (tuple(workload.prompts[0][:2048]) if name == "PREFIX-warm" else ())
    others = {tuple(PRESETS[other](0).prompts[0][:16]) for other in PRESETS if other != name}
    assert tuple(workload.prompts[0][:16]) not in others


def test_ids_fit_the_vocabulary_and_nothing_ends_early() -> None:
    engine = ScriptedEngine(vocab_tokens=50)
    list(throughput(bench_of(engine), {"mine": lambda repeat: fixed(4, 8, 9, repeat)}, 1))
    assert all(0 <= token_id < 50 for ids in engine.seen for token_id in ids)
    assert all(params.ignore_eos and not params.detokenize for params in engine.params)


def test_what_the_model_cannot_hold_is_skipped_and_named() -> None:
    bench = bench_of(ScriptedEngine(max_model_len=200))
    rows = [*latency(bench, ["STEP", "PREFILL"], 1), *latency(bench, ["W4"], 1)]
    skipped = {row.workload for row in rows if isinstance(row, Skipped)}
    measured = {row.workload for row in rows if isinstance(row, LatencyFigure)}
    assert measured == {"PREFILL128"}
    assert skipped == {
        *(f"STEP{batch}" for batch in STEP_BATCHES),
        *(f"PREFILL{n}" for n in PREFILL_LENS[1:]),
        "W4",
    }
    assert Skipped("W4", "384 tokens are over the model's limit of 200") in rows


def test_a_short_answer_is_no_measurement() -> None:
    engine = ScriptedEngine()
    bench = bench_of(engine)
    engine.short_by = 1
    with pytest.raises(WrongAnswer, match="has 8 of 9 tokens"):
        bench.seconds(fixed(2, 8, 9))


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Flags for a real model that is small."""
    folder = save_tiny_llama(tmp_path / "tiny")
    flags = ["--dtype", "float32", "--threads", "1", "--kv-cache-memory", "4MiB"]
    return [str(folder), *flags, "--cache-dir", str(tmp_path / "cache")]


def test_both_commands_with_a_real_model(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    own = ["--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--num-iters", "2"]
    assert cli.main(["bench", "throughput", *tiny, *own, "--json", str(path)]) == 0
    throughput_figures = json.loads(path.read_text())
    assert [row["workload"] for row in throughput_figures["rows"]] == ["3x20x5"] * 2
    assert all(row["output_tokens"] == 15 for row in throughput_figures["rows"])
    assert all(row["output_throughput"] > 0 for row in throughput_figures["rows"])
    note = f"Token ids are taken modulo the model's vocabulary of {VOCAB_TOKENS}."
    assert throughput_figures["notes"] == [note]
    assert throughput_figures["settings"]["model"]["dtype"] == "float32"
    assert throughput_figures["settings"].keys() == {"model", "cache", "scheduler", "parallel"}
    assert throughput_figures["environment"]["packages"]["torch"]

    wanted = ["--workload", "W4", "--num-iters", "1"]
    assert cli.main(["bench", "latency", *tiny, *wanted, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row == {
        "workload": "W4",
        "skipped": f"384 tokens are over the model's limit of {MAX_TOKENS}",
        "gpu": None,
    }
    out = capsys.readouterr().out
    assert note in out
    assert "output tok/s" in out
    assert "W4           skipped: 384 tokens" in out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["throughput", "--workload", "W9"], "invalid choice: 'W9'"),
        (["latency", "--workload", "W1"], "invalid choice: 'W1'"),
        (["throughput", "--input-len", "5"], "give either --workload, or all of --num-prompts"),
        (
            ["throughput", "--workload", "W4", "--num-prompts", "1", "--input-len", "5",
             "--output-len", "5"],
            "give either --workload, or all of",
        ),
        (["startup", "--num-iter", "1"], "the nearest is --num-iters"),
        (["startup", "--max-num-seqs", "x"], "max_num_seqs = 'x'"),
        (["latency", "a", "--model", "b", "--workload", "W4"], "two models are given"),
        (["warmth"], "invalid choice: 'warmth'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) == cli.EXIT_STARTUP
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
