"""Logging: structlog everywhere, the standard library's loggers beside it in the same form.

Lines go to stderr, for a person in a terminal or as JSON otherwise. Each carries the service's
name, and whatever the task bound: `structlog.contextvars.bind_contextvars(request_id=…)`.

An event with many figures may bring a `table`, a list of (name, value) in words: people see it in
place of the figures, a line each.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from pagemesh.shared.settings import LogSettings

# Libraries that narrate what is of interest only when debugging them: numba says a hundred thousand
# things while it compiles, which then takes minutes.
_QUIET: Final = ("asyncio", "filelock", "httpx", "urllib3", "huggingface_hub", "numba")


def configure_logging(service: str, settings: LogSettings) -> None:
    """Route structlog and logging of this process to stderr. Call once, at the start of main.

    Our own lines, one for each request, go there directly: through the standard library's loggers
    a line takes three times as long.
    """
    origin = _Origin(service, human=is_human(settings))
    shared: list[Processor] = [structlog.contextvars.merge_contextvars, origin]
    renderers = _renderers(settings)
    wrapper = structlog.make_filtering_bound_logger(settings.log_level)
    if not is_human(settings) and settings.log_level in ("debug", "info"):
        wrapper = type("DirectLogger", (wrapper,), {"info": _direct_info(wrapper, origin)})
    structlog.configure(
        processors=[*shared, *renderers],
        logger_factory=_Lines,
        wrapper_class=wrapper,
        cache_logger_on_first_use=True,
    )
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.PositionalArgumentsFormatter(), *shared],
            processors=[remove_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def _direct_info(wrapper: type[FilteringBoundLogger], origin: _Origin) -> Callable[..., None]:
    """The `info` of bound loggers, since every request brings such a line. It does what the
    processors do; through their list a line takes twice as long."""

    def info(self: Any, event: str, *args: Any, **fields: Any) -> None:
        if args:  # to be put into the event
            wrapper.info(self, event, *args, **fields)
            return
        logger: _Lines = self._logger
        own = {
            **self._context,
            **fields,
            "event": event,
            "level": "info",
            "logger": logger.name,
            "timestamp": origin.now(),
        }
        line = structlog.contextvars.merge_contextvars(logger, "info", own)
        line.setdefault("service", origin.service)
        logger.msg(_as_json(logger, "info", line))

    return info


class _Lines:
    """Writes lines to stderr, whatever that is by then. `name` is that of the module."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = exception = msg


def is_human(settings: LogSettings) -> bool:
    """Whether lines are written for a person."""
    if settings.log_format == "auto":
        return sys.stderr.isatty()
    return settings.log_format == "human"


class _Origin:
    """Says of each line whence and when it came. One processor, since each has its price."""

    def __init__(self, service: str, *, human: bool) -> None:
        self.service = service
        self._human = human
        self._second = 0
        self._shown_second = ""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        record = event.get("_record")
        event["level"] = method
        event["logger"] = logger.name if record is None else record.name
        event["timestamp"] = self.now()
        event.setdefault("service", self.service)
        return event

    def now(self) -> str:
        now_s = time.time()
        second = int(now_s)
        if second != self._second:
            self._second, self._shown_second = second, self._show(second)
        if self._human:
            return self._shown_second
        return f"{self._shown_second}.{int((now_s - second) * 1e6):06d}Z"

    def _show(self, second: int) -> str:
        if self._human:
            return time.strftime("%H:%M:%S", time.localtime(second))
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _renderers(settings: LogSettings) -> list[Processor]:
    if not is_human(settings):
        return [_as_json]

    def drop_origin(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        for name in ("logger", "service"):
            event.pop(name, None)
        return event

    colors = "NO_COLOR" not in os.environ and (sys.stderr.isatty() or "FORCE_COLOR" in os.environ)
    return [
        drop_origin,
        _only_table,
        structlog.dev.ConsoleRenderer(
            colors=colors,
            pad_event_to=28,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


_encode_json: Final = msgspec.json.Encoder(enc_hook=repr).encode


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Tables are for people."""
    event.pop("table", None)
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    try:
        return _encode_json(event).decode()
    except UnicodeEncodeError:
        # Half a surrogate pair, from a client's text.
        return json.dumps(event, default=repr)


def _only_table(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """The table below the name of the event, in place of everything else it carries."""
    table = event.pop("table", None)
    if table is None:
        return event
    width = max(len(name) for name, _ in table)
    lines = [f"  {name:<{width}}  {value}" for name, value in table]
    kept = {name: event[name] for name in ("timestamp", "level") if name in event}
    return {**kept, "event": "\n".join([event["event"], *lines])}
