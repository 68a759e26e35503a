"""The command `pagemesh`: serve a model, run one service, prepare, show the settings, measure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final

import structlog

from pagemesh.flags import Parser, add_setting_flags, load_given, normal_argv, refuse_unknown
from pagemesh.shared.errors import Stalled, StartupError
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.model_list import listed_models
from pagemesh.shared.settings_sources import Loaded

EXIT_FAILED: Final = 1
EXIT_STARTUP: Final = 2
EXIT_INTERRUPTED: Final = 130

log = structlog.get_logger(__name__)

_COMMANDS: Final = {
    "serve": "serve MODEL …: every service and an embedded registry, on this machine",
    "gateway": "run one gateway: the OpenAI-style HTTP API",
    "tokenizer": "run one tokenizer service: text to token ids and back",
    "scheduler": "run one scheduler: queues, KV blocks, step plans",
    "worker": "run one worker: the model on this machine's device",
    "prepare": "read MODEL once into the folder that the services use",
    "status": "who is in the mesh of --redis-url, and what they have to do",
}
_USAGE: Final = "pagemesh COMMAND [MODEL …] [--flag VALUE …]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (failed), 2 (cannot start), or 128 plus
    the number of a signal."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except StartupError as error:
        print(f"pagemesh: error: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        # As a log line, so that it stays one line where logs are JSON.
        log.exception("failed")
        return EXIT_FAILED


def _dispatch(argv: Sequence[str]) -> int:
    if argv[:1] == ["bench"]:
        from pagemesh.bench.cli import run_bench

        return run_bench(argv[1:])
    if argv[:1] in (["chat"], ["complete"]):
        from pagemesh.talk.cli import run_talk

        return run_talk(argv)
    if argv[:1] == ["run-batch"]:
        from pagemesh.batch.cli import run_batch

        return run_batch(argv[1:])
    if argv[:1] == ["collect-env"]:
        from pagemesh.collect_env import run_collect_env

        return run_collect_env(argv[1:])
    parser, by_command = _build_parsers()
    namespace, extras = parser.parse_known_args(normal_argv(argv))
    given = vars(namespace)
    command: str = given.pop("command")
    refuse_unknown(extras, by_command[command])
    given.pop("action", None)
    loaded = load_given(given)
    return _ACTIONS.get(command, _run_service)(command, loaded)


def _build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = Parser(prog="pagemesh", description="An LLM serving mesh.", usage=_USAGE)
    parser.add_argument("--version", action="version", version=f"pagemesh {version('pagemesh')}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="pagemesh"
    )
    by_command: dict[str, argparse.ArgumentParser] = {}
    for name, help_text in _COMMANDS.items():
        by_command[name] = _add_command(commands, name, help_text)
    commands.add_parser("chat", help="chat [TEXT]: talk to a running server in the terminal")
    commands.add_parser("complete", help="complete [TEXT]: what a running server makes of a text")
    commands.add_parser("run-batch", help="run-batch -i FILE -o FILE: answer an OpenAI batch file")
    commands.add_parser("collect-env", help="what this machine has, for a report of a fault")
    commands.add_parser("bench", help="bench serve|throughput|latency|startup: measure it")
    config = commands.add_parser("config", help="config show: each setting and its origin")
    actions = config.add_subparsers(dest="action", metavar="ACTION", required=True)
    by_command["config"] = _add_command(actions, "show", "print each setting and its origin")
    return parser, by_command


def _add_command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, usage="%(prog)s [MODEL …] [--flag VALUE …]"
    )
    add_setting_flags(command, several=True)
    return command


def _serve(command: str, loaded: Loaded) -> int:
    from pagemesh.launcher import serve_mesh

    configure_logging(command, loaded.settings.log)
    return serve_mesh(loaded.settings)


def _prepare(command: str, loaded: Loaded) -> int:
    from pagemesh.prepare import prepare

    configure_logging(command, loaded.settings.log)
    for model in listed_models(loaded.settings.model):
        print(prepare(model))
    return 0


def _show_config(_: str, loaded: Loaded) -> int:
    from pagemesh.config_show import settings_table

    print(settings_table(loaded))
    return 0


def _show_status(_: str, loaded: Loaded) -> int:
    from pagemesh.status import show_status

    print(show_status(loaded.settings))
    return 0


def _run_service(command: str, loaded: Loaded) -> int:
    from pagemesh.services import run_service
    from pagemesh.shared.watchdog import leave

    configure_logging(command, loaded.settings.log)
    try:
        run_service(command, loaded.settings)
    except Stalled as stalled:
        leave(str(stalled))
    return 0


_ACTIONS: Final[dict[str, Callable[[str, Loaded], int]]] = {
    "serve": _serve,
    "prepare": _prepare,
    "status": _show_status,
    "config": _show_config,
}


if __name__ == "__main__":
    sys.exit(main())
