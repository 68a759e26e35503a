"""`pagemesh bench`: the command line of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pagemesh.bench.options import ServeOptions, add_serve_flags
from pagemesh.flags import Parser, normal_argv, refuse_unknown

EXIT_FAILED: Final = 1
_COMMANDS: Final = {
    "serve": "load on any OpenAI-style server: throughput, TTFT, TPOT, ITL, goodput",
}


def run_bench(argv: Sequence[str]) -> int:
    """Run one benchmark; 1 when something in it failed. Raises StartupError."""
    parser = Parser(prog="pagemesh bench", description="Measure pagemesh, or its peers.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    by_command = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    add_serve_flags(by_command["serve"])
    namespace, extras = parser.parse_known_args(normal_argv(argv))
    given = vars(namespace)
    command = given.pop("command")
    refuse_unknown(extras, by_command[command])
    return _serve(given)


def _serve(given: dict[str, Any]) -> int:
    from pagemesh.bench.serve import bench_serve

    options = ServeOptions(**given)
    report = bench_serve(options)
    print(report.as_text())
    _write_json(options.json, report.as_json())
    return EXIT_FAILED if report.summary.failed else 0


def _write_json(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
