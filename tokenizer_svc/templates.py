"""Chat templates: Jinja in a sandbox, the same environment that transformers gives them.

The template belongs to whoever runs the server, or to who is trusted with it; the messages come
from anybody. So a render is bounded in time and in size, and whatever it raises is the fault of the
one request. A single call within it, such as a filter's, is not: that takes a template made for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemesh.shared.errors import RequestError, StartupError

MAX_RENDER_S: Final = 10.0
MAX_RENDERED_CHARS: Final = 64 * 2**20
# Of a filter that templates do not write.
_TIMED: Final = "each in time"


class _RenderLimit(TemplateError):
    """A render took too long or grew too large."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Looks at the clock at each lookup and call, and each time round a loop."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._deadline_s: ContextVar[float] = ContextVar("deadline_s", default=float("inf"))
        self.filters["tojson"] = _to_json
        self.filters[_TIMED] = self._timed
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def time_limit(self, limit_s: float) -> Iterator[None]:
        token = self._deadline_s.set(time.monotonic() + limit_s)
        try:
            yield
        finally:
            self._deadline_s.reset(token)

    def check_time(self) -> None:
        if time.monotonic() > self._deadline_s.get():
            raise _RenderLimit(f"the chat template ran for more than {MAX_RENDER_S:.0f} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        return tree

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this escapes no HTML; templates were written for that."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. Threads may share it. Raises StartupError when it does not parse."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
            self.variables: Final = meta.find_undeclared_variables(self._sandbox.parse(source))
            """That it reads and does not set."""
        except TemplateSyntaxError as error:
            raise StartupError(
                f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); "
                "replace it with --chat-template"
            ) from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises RequestError (400) with the template's own message."""
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            with self._sandbox.time_limit(MAX_RENDER_S):
                return self._bounded(context)
        # A template may raise anything at all over a message it did not expect.
        except Exception as error:
            raise RequestError(
                f"the chat template does not accept these messages: {error}", param="messages"
            ) from error

    def _bounded(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        n_chars = 0
        for piece in self._template.generate(context):
            n_chars += len(piece)
            if n_chars > MAX_RENDERED_CHARS:
                raise _RenderLimit(f"the prompt exceeds {MAX_RENDERED_CHARS} characters")
            self._sandbox.check_time()
            pieces.append(piece)
        return "".join(pieces)
