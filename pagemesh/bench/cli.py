"""`pagemesh bench`: the command line of the benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from pagemesh.bench.options import ServeOptions, add_serve_flags, count, output_file
from pagemesh.bench.workloads import HIGHEST_ID, LATENCY_PRESETS, PRESETS, Workload, fixed
from pagemesh.flags import Parser, add_setting_flags, load_given, normal_argv, refuse_unknown
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.settings import Settings

if TYPE_CHECKING:
    from pagemesh.bench.offline import OfflineBench
    from pagemesh.bench.report_local import Row

EXIT_FAILED: Final = 1
_IDS_ONLY: Final = (
    "Prompts are token ids and so are the answers: no text is made of them (detokenize=False), "
    "as vLLM and its peers are measured offline."
)
_REPEATS: Final = 3
_COMMANDS: Final = {
    "serve": "load on any OpenAI-style server: throughput, TTFT, TPOT, ITL, goodput",
    "throughput": "the engine in this process, without a server: tokens a second",
    "latency": "the engine in this process: first token, decode step, prefill",
    "startup": "from `pagemesh serve` to its first answer, and the memory it takes",
}


def run_bench(argv: Sequence[str]) -> int:
    """Run one benchmark; 1 when something in it failed. Raises StartupError."""
    parser = Parser(prog="pagemesh bench", description="Measure pagemesh, or its peers.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    by_command = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    add_serve_flags(by_command["serve"])
    for command in ("throughput", "latency", "startup"):
        _add_local_flags(command, by_command[command])
    namespace, extras = parser.parse_known_args(normal_argv(argv))
    given = vars(namespace)
    command = given.pop("command")
    refuse_unknown(extras, by_command[command])
    return _ACTIONS[command](given)


def _add_local_flags(command: str, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark", None if command == "startup" else _IDS_ONLY)
    group.add_argument(
        "--num-iters", type=count, metavar="N", help=f"repeats (default: {_REPEATS})"
    )
    group.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the figures to this file"
    )
    if command != "startup":
        names = PRESETS if command == "throughput" else LATENCY_PRESETS
        group.add_argument(
            "--workload", nargs="+", choices=names, metavar="NAME", help=", ".join(names)
        )
    if command == "throughput":
        own = "of a workload of your own, in place of --workload"
        for flag in ("--num-prompts", "--input-len", "--output-len"):
            group.add_argument(flag, type=count, metavar="N", help=own)
    add_setting_flags(parser)


def _serve(given: dict[str, Any]) -> int:
    from pagemesh.bench.serve import bench_serve

    options = ServeOptions(**given)
    report = bench_serve(options)
    print(report.as_text())
    _write_json(options.json, report.as_json())
    return EXIT_FAILED if report.summary.failed else 0


def _throughput(given: dict[str, Any]) -> int:
    from pagemesh.bench.offline import throughput

    n_repeats, path = given.pop("num_iters", _REPEATS), given.pop("json", None)
    draws = _draws(given)
    return _offline(given, lambda bench: throughput(bench, draws, n_repeats), path)


def _latency(given: dict[str, Any]) -> int:
    from pagemesh.bench.offline import latency

    n_repeats, path = given.pop("num_iters", _REPEATS), given.pop("json", None)
    names = given.pop("workload", ["W4"])
    return _offline(given, lambda bench: latency(bench, names, n_repeats), path)


def _offline(
    given: dict[str, Any], measure: Callable[[OfflineBench], Iterable[Row]], path: Path | None
) -> int:
    """Each row is shown as soon as it is measured."""
    from pagemesh.bench.engine import computes_on_gpu, engine_settings, offline_llm
    from pagemesh.bench.environment import environment, sampled_card
    from pagemesh.bench.offline import OfflineBench, warmups
    from pagemesh.bench.report_local import row_line, sampled_rows

    settings = load_given(given).settings
    llm, gpu = offline_llm(settings), computes_on_gpu(settings)
    notes, shown = _notes(llm.card.vocab_tokens), []
    print("\n".join(notes))
    bench = OfflineBench(llm, warmups=warmups(gpu=gpu))
    with sampled_card(on=gpu) as card:
        for row, figures in sampled_rows(measure(bench), card):
            print(row_line(row), flush=True)
            shown.append(figures)
    where = {"settings": engine_settings(settings), "environment": environment()}
    _write_json(path, {"notes": notes, "rows": shown, **where})
    return 0


def _startup(given: dict[str, Any]) -> int:
    from pagemesh.bench.report_local import startup_json, startup_lines
    from pagemesh.bench.startup import measure_startup

    n_runs, path = given.pop("num_iters", _REPEATS), given.pop("json", None)
    settings = load_given(given).settings
    runs = [asyncio.run(measure_startup(_on_a_free_port(settings))) for _ in range(n_runs)]
    print("\n".join(startup_lines(runs)))
    _write_json(path, startup_json(runs))
    return 0


def _draws(given: dict[str, Any]) -> dict[str, Callable[[int], Workload]]:
    """The workloads asked for by name, or the one described by its sizes."""
    sizes = [given.pop(name, None) for name in ("num_prompts", "input_len", "output_len")]
    names = given.pop("workload", None)
    if sizes == [None] * len(sizes):
        return {name: PRESETS[name] for name in names or ["W5"]}
    if names is not None or None in sizes:
        raise SettingsError(
            "give either --workload, or all of --num-prompts, --input-len and --output-len",
            key="workload",
        )
    return {"x".join(map(str, sizes)): partial(fixed, *sizes)}


def _notes(vocab_tokens: int) -> list[str]:
    if vocab_tokens > HIGHEST_ID:
        return []
    return [f"Token ids are taken modulo the model's vocabulary of {vocab_tokens}."]


def _on_a_free_port(settings: Settings) -> Settings:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    return replace(settings, gateway=replace(settings.gateway, port=port))


def _write_json(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


_ACTIONS: Final[dict[str, Callable[[dict[str, Any]], int]]] = {
    "serve": _serve,
    "throughput": _throughput,
    "latency": _latency,
    "startup": _startup,
}
