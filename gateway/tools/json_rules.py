"""JSON (RFC 8259) as rules, and the JSON objects that say a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Final

from pagemesh.gateway.tools.scanner import Malformed, Rule, Scanner

MAX_DEPTH: Final = 64
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_OTHER_KEYS: Final = ("id", "type")
_SPACE: Final = re.compile(r"[ \t\n\r]+")
_UNESCAPED: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPED: Final = frozenset('"\\/bfnrt')
_SCALAR_CHARS: Final = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX: Final = frozenset("0123456789abcdefABCDEF")

Put = Callable[[str], object]
"""Gets the next piece of a value's text, once it is sure."""


def json_value(scanner: Scanner, put: Put, depth: int = 0) -> Rule[None]:
    char = yield from scanner.peek()
    if char == '"':
        yield from json_string(scanner, put)
    elif char in ("{", "["):
        yield from _json_container(scanner, put, depth)
    else:
        text = yield from scanner.run(_SCALAR_CHARS)
        if not _SCALAR.fullmatch(text):
            raise Malformed
        put(text)


def _json_container(scanner: Scanner, put: Put, depth: int) -> Rule[None]:
    if depth == MAX_DEPTH:
        raise Malformed
    opening = scanner.take()
    close = "}" if opening == "{" else "]"
    put(opening)
    char = yield from _space(scanner, put)
    while char != close:
        if close == "}":
            yield from _key(scanner, put)
        yield from json_value(scanner, put, depth + 1)
        char = yield from _space(scanner, put)
        if char == ",":
            put(scanner.take())
            if (yield from _space(scanner, put)) == close:
                raise Malformed
        elif char != close:
            raise Malformed
    put(scanner.take())


def _key(scanner: Scanner, put: Put) -> Rule[None]:
    yield from json_string(scanner, put)
    yield from _space(scanner, put)
    yield from scanner.literal(":")
    put(":")
    yield from _space(scanner, put)


def _space(scanner: Scanner, put: Put) -> Rule[str]:
    """The character behind the white space, not taken."""
    space = yield from scanner.run(_SPACE)
    if space:
        put(space)
    return (yield from scanner.peek())


def json_string(scanner: Scanner, put: Put) -> Rule[None]:
    """A control character that should have been escaped is escaped here."""
    yield from scanner.literal('"')
    put('"')
    while (char := (yield from scanner.peek())) != '"':
        if char == "":
            raise Malformed
        if char == "\\":
            put((yield from _escape(scanner)))
        elif char < " ":
            put(json.dumps(scanner.take())[1:-1])
        else:
            put(scanner.take_run(_UNESCAPED))
    put(scanner.take())


def _escape(scanner: Scanner) -> Rule[str]:
    text = scanner.take()
    char = yield from scanner.peek()
    if char in _ESCAPED:
        return text + scanner.take()
    yield from scanner.literal("u")
    text += "u"
    for _ in range(4):
        if (yield from scanner.peek()) not in _HEX:
            raise Malformed
        text += scanner.take()
    return text


def json_text(scanner: Scanner) -> Rule[str]:
    """What a JSON string stands for."""
    pieces: list[str] = []
    yield from json_string(scanner, pieces.append)
    text: str = json.loads("".join(pieces))
    return text


def streamed_object(scanner: Scanner) -> Rule[None]:
    """The arguments of a call that has started, byte for byte."""
    yield from cut_with_text(scanner, json_value(scanner, scanner.arguments))


def cut_with_text(scanner: Scanner, arguments: Rule[None]) -> Rule[None]:
    """A text that ends within arguments ends them too: what is left belongs to them."""
    try:
        yield from arguments
    except Malformed:
        if scanner.held and not (yield from scanner.peek()):
            scanner.arguments(scanner.held)
        raise


def calls(scanner: Scanner, tools: Container[str] | None) -> Rule[None]:
    """A call object, or a list of them. `tools`: the only names and keys that make it a call; None
    where tags around it tell."""
    if (yield from scanner.peek()) != "[":
        yield from _CallObject(scanner, tools).read()
        return
    scanner.take()
    yield from scanner.space()
    yield from _CallObject(scanner, tools).read()
    while (yield from scanner.space()) != "]":
        yield from scanner.literal(",")
        yield from scanner.space()
        yield from _CallObject(scanner, tools).read()
    scanner.take()
    scanner.settle()


class _CallObject:
    """{"name": …, "arguments": {…}} in either order; other keys are passed over.

    The call starts when both are known. Arguments behind the name are streamed; those that are a
    string holding JSON, or null, are made an object.
    """

    def __init__(self, scanner: Scanner, tools: Container[str] | None) -> None:
        self._scanner = scanner
        self._tools = tools
        self._name: str | None = None
        self._arguments: str | None = None
        self._started = False

    def read(self) -> Rule[None]:
        scanner = self._scanner
        yield from scanner.literal("{")
        yield from scanner.space()
        yield from self._member()
        while (yield from scanner.space()) != "}":
            yield from scanner.literal(",")
            yield from scanner.space()
            yield from self._member()
        if not self._started and self._tools is None:
            self._start(self._arguments or "{}")
        if not self._started:
            raise Malformed
        scanner.take()
        scanner.settle()

    def _member(self) -> Rule[None]:
        scanner = self._scanner
        key = yield from json_text(scanner)
        yield from scanner.space()
        yield from scanner.literal(":")
        yield from scanner.space()
        if key == "name" and not self._started:
            self._name = yield from json_text(scanner)
        elif key in _ARGUMENT_KEYS and not self._started:
            yield from self._read_arguments()
        elif self._tools is None or key in _OTHER_KEYS or self._started:
            yield from json_value(scanner, len)
        else:
            raise Malformed
        if self._arguments is not None and self._name is not None and not self._started:
            self._start(self._arguments)

    def _read_arguments(self) -> Rule[None]:
        scanner = self._scanner
        char = yield from scanner.peek()
        if char == "{" and self._name is not None:
            self._start("")
            yield from streamed_object(scanner)
        elif char == "{":
            pieces: list[str] = []
            yield from json_value(scanner, pieces.append)
            self._arguments = "".join(pieces)
        elif char == '"':
            self._arguments = _checked_object((yield from json_text(scanner)))
        else:
            yield from scanner.literal("null")
            self._arguments = "{}"

    def _start(self, arguments: str) -> None:
        if not self._name or (self._tools is not None and self._name not in self._tools):
            raise Malformed
        self._scanner.start_call(self._name)
        self._started = True
        if arguments:
            self._scanner.arguments(arguments)


def _checked_object(text: str) -> str:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Malformed
    return text
