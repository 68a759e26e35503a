"""pagemesh beside its peers on a CPU: each server in turn, the same requests, ratios of one run.

    python benchmarks/cpu_peers.py --json figures.json \\
        --server ours='pagemesh serve --port {port}' \\
        --server ours-int8='pagemesh serve --port {port} --quantization int8' \\
        --server vllm='env VLLM_CPU_OMP_THREADS_BIND=0-1 LD_PRELOAD=… vllm serve FOLDER \\
            --port {port} --max-model-len 8192 --dtype bfloat16' \\
        --server llama-q8='llama-server -m MODEL-Q8_0.gguf --port {port} -t 2 -np 32 \\
            -c 32768 --kv-unified' \\
        --ours ours ours-int8

Rounds are interleaved: every server is started, driven through all rows and stopped, then the next
one; then all of them again. What stands in a row is the median of the rounds. Prompts are random
token ids below --vocab-size, the same for every server and different in each row and round; a
server that refuses ids as a prompt gets text instead, and a note says so. Greedy, `ignore_eos`.

How to install the peers from PyPI: docs/benchmarking.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import msgspec
from parts.rows import ROWS, Row, run_options
from parts.served import Command, Served, ServerFailed, served
from parts.table import medians, ratios, table_lines

from pagemesh.bench.options import output_file
from pagemesh.bench.serve import bench_serve
from pagemesh.shared.errors import PagemeshError

_SEEDS_PER_ROUND: Final = 100
_MIB: Final = 2**20
_SERVER_TITLES: Final = {
    "start": "start to first answer (s)",
    "memory": "peak memory of the tree, PSS (MiB)",
    "memory_rss": "the same, sum of RSS (MiB)",
}
TITLES: Final = {row.key: f"{row.title} ({row.unit})" for row in ROWS} | _SERVER_TITLES


class Comparison:
    """Collects the samples of every server, and what went wrong or must be known."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.samples: dict[str, dict[str, list[float]]] = {
            command.name: defaultdict(list) for command in args.server
        }
        self.runs: list[dict[str, Any]] = []
        self.notes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.failed = False
        self._args = args
        self._folder = folder

    def run(self) -> None:
        for round_ in range(self._args.rounds):
            for command in self._args.server:
                _say(f"round {round_ + 1}: {command.name}")
                try:
                    self._drive(command, round_)
                except ServerFailed as error:
                    self._fail(command.name, "start", str(error))

    def _drive(self, command: Command, round_: int) -> None:
        log = self._folder / f"{command.name}-{round_}.log"
        with served(command, log, self._args.start_timeout_s) as server:
            self._add(command.name, "start", server.start_s)
            for index, row in enumerate(ROWS):
                if row.key in self._args.rows:
                    self._measure(command.name, server, row, round_ * _SEEDS_PER_ROUND + index)
        self._add(command.name, "memory", server.memory.total.pss / _MIB)
        self._add(command.name, "memory_rss", server.memory.total.rss / _MIB)

    def _measure(self, name: str, server: Served, row: Row, seed: int) -> None:
        args = self._args
        options = run_options(
            row, server.url, seed=seed, vocab_tokens=args.vocab_size, scale=args.scale
        )
        try:
            report = bench_serve(options)
        except PagemeshError as error:
            self._fail(name, row.key, str(error))
            return
        figures = report.as_json()
        self.runs.append({"server": name, "row": row.key, **figures})
        for note in (*figures["notes"], *figures["client"]["limits"]):
            self.notes[name, note].append(row.key)
        if figures["failed"]:
            self._fail(name, row.key, f"{figures['failed']} requests failed")
        elif figures["completed"]:
            self._add(name, row.key, row.figure(figures))

    def _add(self, name: str, key: str, value: float) -> None:
        self.samples[name][key].append(value)
        _say(f"  {TITLES[key]}: {value:.2f}")

    def _fail(self, name: str, where: str, what: str) -> None:
        self.failed = True
        self.notes[name, f"FAILED: {what}"].append(where)
        _say(f"  {name} ({where}) FAILED: {what}")

    def as_text(self) -> str:
        figures = medians(self.samples)
        lines = [f"medians of {self._args.rounds} rounds", *table_lines(TITLES, figures, 1)]
        for own in self._args.ours:
            if columns := self._peers(ratios(figures, own)):
                lines += ["", f"{own} / peer (of seconds and MiB, less is better)"]
                lines += table_lines(TITLES, columns, 2)
        return "\n".join([*lines, "", *self.note_lines()])

    def note_lines(self) -> list[str]:
        """Each note once, with the rows that it is of."""
        return [
            f"{name} ({', '.join(dict.fromkeys(rows))}): {note}"
            for (name, note), rows in self.notes.items()
        ]

    def as_json(self) -> dict[str, Any]:
        figures = medians(self.samples)
        return {
            "servers": {command.name: command.line for command in self._args.server},
            "medians": figures,
            "ratios": {own: self._peers(ratios(figures, own)) for own in self._args.ours},
            "samples": self.samples,
            "notes": self.note_lines(),
            "runs": self.runs,
        }

    def _peers(self, columns: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        return {name: column for name, column in columns.items() if name not in self._args.ours}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command(text: str) -> Command:
    name, _, line = text.partition("=")
    if not name or "{port}" not in line:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME='COMMAND … {{port}} …'")
    return Command(name, line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = [row.key for row in ROWS]
    add = parser.add_argument
    add("--server", type=_command, action="append", required=True, metavar="NAME=COMMAND")
    add("--ours", nargs="+", metavar="NAME", help="compared with the rest (default: the first)")
    add("--rounds", type=int, default=2)
    add("--rows", nargs="*", choices=keys, default=keys, metavar="ROW", help=", ".join(keys))
    add("--vocab-size", type=int, default=49152, help="ids are drawn below this")
    add("--start-timeout-s", type=float, default=600.0)
    add("--scale", type=float, default=1.0, help="below 1: smaller sizes, for a trial")
    add("--logs", type=Path, metavar="FOLDER", help="keep the servers' output here")
    add("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    args.ours = args.ours or [args.server[0].name]
    return args


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="cpu-peers-") as scratch:
        comparison = Comparison(args, args.logs or Path(scratch))
        comparison.run()
    print(comparison.as_text())
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(comparison.as_json())))
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
