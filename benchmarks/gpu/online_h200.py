"""The mesh under load on one H200, beside vLLM's server there and our goals.

    python benchmarks/gpu/online_h200.py qwen3-0.6b --out DIR
    python benchmarks/gpu/online_h200.py llama31-8b --concurrency 256 --out DIR

MODEL is a shape by name (see parts/model_shapes.py) or what `pagemesh serve` takes; every setting
is a flag. `pagemesh serve` is started and, after a warm-up, driven by `pagemesh bench serve`: each
`--concurrency` in turn, `--rounds` times, always with other prompts. CPU time is that of the
seconds of the load in which the services used most. Then the server is stopped and one engine in
this process does the same work, no more requests at a time than the largest `--concurrency`: the
mesh is asked for 0.97 of its tokens a second. The linear layers tell how the machine compares with
that of vLLM's figures, as in offline_h200.py.

What fails is named and the rest goes on; every figure is written as soon as it is there, and the
output of the server and of every load lies beside them. Exits with 1 when something failed.
"""

from __future__ import annotations

import shlex
import signal
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace
from parts.engine_rows import engine_rows, machine_ms
from parts.online_load import Load, LoadFailed, run_load
from parts.online_report import ONLINE, OnlineReport
from parts.served import Command, Served, ServerFailed, served
from parts.shape_args import parse_shape_args

from pagemesh.bench.environment import CardSamples, sampled_card
from pagemesh.bench.offline import OfflineBench, WrongAnswer, throughput
from pagemesh.bench.report_local import Row
from pagemesh.bench.workloads import Workload, fixed
from pagemesh.children import service_spec
from pagemesh.prepare import prepare
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import guarded
from pagemesh.worker_svc.memory import GPU_NUM_SEQS

EXIT_INTERRUPTED: Final = 130


def add_options(group: Any) -> None:
    add = group.add_argument
    add("--concurrency", type=int, nargs="+", default=[64, 256], help="requests at a time")
    add("--rounds", type=int, default=2, metavar="N", help="runs of each")
    add("--num-prompts", type=int, default=400, metavar="N", help="requests of a run")
    add("--input-len", type=int, default=512, metavar="N", help="prompt tokens of a request")
    add("--output-len", type=int, default=128, metavar="N", help="output tokens of a request")
    add("--clients", type=int, default=4, metavar="N", help="client processes")
    add("--offline", action=BooleanOptionalAction, default=True, help="the same work without mesh")
    add("--start-timeout-s", type=float, default=400.0, metavar="S")
    add("--run-timeout-s", type=float, default=300.0, metavar="S", help="of one run")
    add("--out", type=Path, default=Path("online-h200"), metavar="DIR")


def measure_online(args: Namespace, settings: Settings, report: OnlineReport) -> None:
    """Raises ServerFailed."""
    spec = service_spec("serve", settings)
    command = Command("pagemesh", shlex.join(guarded(spec.command)) + " --port {port}")
    log = args.out / f"{report.name}.log"
    serving = served(command, log, args.start_timeout_s, environ=spec.environ, watches_memory=False)
    with serving as server, sampled_card() as card:
        report.add_start(server.start_s)
        drive(args, server, card, report)


def drive(args: Namespace, server: Served, card: CardSamples, report: OnlineReport) -> None:
    for name, repeat, load in loads(args):
        try:
            figures = run_load(server, load, card, args.out, args.run_timeout_s)
        except LoadFailed as error:
            report.fail(f"{name} #{repeat}", str(error))
            continue
        report.add_run(name, repeat, figures)


def loads(args: Namespace) -> Iterator[tuple[str, int, Load]]:
    """Name, repeat and load of each run; first a warm-up, in which all prompts go out at once."""
    seeds = count(1)
    lens = args.input_len, args.output_len
    most = max(args.concurrency)
    yield "warm-up", 0, Load(most, *lens, most, args.clients, next(seeds))
    for repeat in range(args.rounds):
        for at_a_time in args.concurrency:
            load = Load(args.num_prompts, *lens, at_a_time, args.clients, next(seeds))
            yield f"{ONLINE}{at_a_time}", repeat, load


def measure_offline(args: Namespace, settings: Settings, report: OnlineReport) -> None:
    most = min(max(args.concurrency), settings.scheduler.max_num_seqs or GPU_NUM_SEQS)
    settings = replace(settings, scheduler=replace(settings.scheduler, max_num_seqs=most))

    def drawn(repeat: int) -> Workload:
        return fixed(args.num_prompts, args.input_len, args.output_len, repeat, salt="online")

    def rows_of(bench: OfflineBench) -> Iterator[Row]:
        return throughput(bench, {f"OFFLINE{most}": drawn}, args.rounds)

    for row, figures in engine_rows(settings, rows_of):
        report.add_offline(most, row, figures)


def measure(args: Namespace, settings: Settings, report: OnlineReport) -> None:
    try:
        measure_online(args, settings, report)
    except ServerFailed as error:
        report.fail("pagemesh serve", str(error))
    if times_ms := machine_ms(settings):
        report.add_linear_layers(times_ms)
    if args.offline:
        try:
            measure_offline(args, settings, report)
        except WrongAnswer as error:
            report.fail("offline", str(error))


def main() -> int:
    # Both ends are orderly: no process stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args, settings = parse_shape_args("online_h200", __doc__, add_options)
    prepare(settings.model)
    args.out.mkdir(parents=True, exist_ok=True)
    report = OnlineReport(args.out, settings, (args.num_prompts, args.input_len, args.output_len))
    try:
        measure(args, settings, report)
    except KeyboardInterrupt:
        report.fail("all", "interrupted")
        return EXIT_INTERRUPTED
    finally:
        report.say_compared()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
