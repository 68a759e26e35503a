"""Logging: structlog everywhere, the standard library's loggers routed through it.

Lines go to stderr, for a person in a terminal or as JSON otherwise. Each carries the service's
name, and whatever the task bound: `structlog.contextvars.bind_contextvars(request_id=…)`.

An event with many figures may bring a `table`, a list of (name, value) in words: people see it in
place of the figures, a line each.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from pagemesh.shared.settings import LogSettings

# Libraries that narrate at info level what is of interest only when debugging them.
_QUIET: Final = ("asyncio", "filelock", "httpx", "urllib3", "huggingface_hub")


def configure_logging(service: str, settings: LogSettings) -> None:
    """Route structlog and logging of this process to stderr. Call once, at the start of main."""
    shared = _shared_processors(service, human=is_human(settings))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_renderers(settings)
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def is_human(settings: LogSettings) -> bool:
    """Whether lines are written for a person."""
    if settings.log_format == "auto":
        return sys.stderr.isatty()
    return settings.log_format == "human"


def _shared_processors(service: str, *, human: bool) -> list[Processor]:
    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
        add_service,
    ]


def _renderers(settings: LogSettings) -> list[Processor]:
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if not is_human(settings):
        return [
            remove_meta,
            _without_table,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]

    def drop_origin(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        for name in ("logger", "service"):
            event.pop(name, None)
        return event

    colors = "NO_COLOR" not in os.environ and (sys.stderr.isatty() or "FORCE_COLOR" in os.environ)
    return [
        remove_meta,
        drop_origin,
        _only_table,
        structlog.dev.ConsoleRenderer(
            colors=colors,
            pad_event_to=28,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _without_table(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event.pop("table", None)
    return event


def _only_table(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """The table below the name of the event, in place of everything else it carries."""
    table = event.pop("table", None)
    if table is None:
        return event
    width = max(len(name) for name, _ in table)
    lines = [f"  {name:<{width}}  {value}" for name, value in table]
    kept = {name: event[name] for name in ("timestamp", "level") if name in event}
    return {**kept, "event": "\n".join([event["event"], *lines])}
