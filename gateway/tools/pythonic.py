"""Calls written as Python: [get_weather(city="Paris", days=3), now()]. Arguments become JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Final

from pagemesh.gateway.tools.json_rules import MAX_DEPTH, Put, cut_with_text
from pagemesh.gateway.tools.scanner import Malformed, Rule, Scanner

_PLAIN: Final = re.compile(r"[^\[<]*")
_NAME: Final = re.compile(r"[\w.-]+")
_KEY: Final = re.compile(r"\w+")
_SCALAR_CHARS: Final = re.compile(r"[-+.\w]+")
_JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_QUOTED: Final = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {
    char: char for char in "\\'\""
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}


def pythonic(scanner: Scanner, tools: Container[str]) -> Rule[None]:
    """Llama 3.2 and, between <|python_start|> and <|python_end|>, Llama 4."""
    while (yield from scanner.content_run(_PLAIN)):
        yield from scanner.attempt(_call_list(scanner, tools))


def _call_list(scanner: Scanner, tools: Container[str]) -> Rule[None]:
    is_tagged = (yield from scanner.peek()) == "<"
    if is_tagged:
        yield from scanner.literal("<|python_start|>")
        yield from scanner.space()
    yield from scanner.literal("[")
    yield from scanner.space()
    yield from _call(scanner, tools)
    while (yield from scanner.space()) != "]":
        yield from scanner.literal(",")
        yield from scanner.space()
        yield from _call(scanner, tools)
    scanner.take()
    scanner.settle()
    if is_tagged:
        yield from scanner.space()
        yield from scanner.literal("<|python_end|>")
        scanner.settle()


def _call(scanner: Scanner, tools: Container[str]) -> Rule[None]:
    name = yield from scanner.run(_NAME)
    yield from scanner.literal("(")
    if name not in tools:
        raise Malformed
    if (yield from scanner.space()) == ")":
        scanner.take()
        scanner.start_call(name)
        scanner.arguments("{}")
        return
    key = yield from _key(scanner)
    scanner.start_call(name)
    yield from cut_with_text(scanner, _arguments(scanner, key))


def _arguments(scanner: Scanner, key: str) -> Rule[None]:
    """All of them; `key` and its = have been read."""
    opening = "{"
    while True:
        scanner.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(scanner, scanner.arguments)
        if (yield from _next_item(scanner, ")")) == ")":
            break
        key = yield from _key(scanner)
        opening = ", "
    scanner.take()
    scanner.arguments("}")


def _key(scanner: Scanner) -> Rule[str]:
    key = yield from scanner.run(_KEY)
    yield from scanner.space()
    yield from scanner.literal("=")
    yield from scanner.space()
    if not key:
        raise Malformed
    return key


def _next_item(scanner: Scanner, close: str) -> Rule[str]:
    """Pass over the comma behind an item; the character of the next one, or `close`, not taken."""
    char = yield from scanner.space()
    if char == close:
        return char
    yield from scanner.literal(",")
    return (yield from scanner.space())


def _value(scanner: Scanner, put: Put, depth: int = 0) -> Rule[None]:
    """One literal, as JSON; tuples are lists."""
    char = yield from scanner.peek()
    if char in _QUOTED:
        yield from _string(scanner, put)
    elif char in _CLOSING:
        yield from _container(scanner, put, depth)
    else:
        put(_scalar((yield from scanner.run(_SCALAR_CHARS))))


def _container(scanner: Scanner, put: Put, depth: int) -> Rule[None]:
    if depth == MAX_DEPTH:
        raise Malformed
    opening = scanner.take()
    close = _CLOSING[opening]
    is_dict = close == "}"
    separator = "{" if is_dict else "["
    char = yield from scanner.space()
    if char == close:
        put(separator)
    while char != close:
        put(separator)
        if is_dict:
            yield from _dict_key(scanner, put)
        yield from _value(scanner, put, depth + 1)
        char = yield from _next_item(scanner, close)
        separator = ", "
    scanner.take()
    put("}" if is_dict else "]")


def _dict_key(scanner: Scanner, put: Put) -> Rule[None]:
    if (yield from scanner.peek()) not in _QUOTED:
        raise Malformed
    yield from _string(scanner, put)
    yield from scanner.space()
    yield from scanner.literal(":")
    yield from scanner.space()
    put(": ")


def _string(scanner: Scanner, put: Put) -> Rule[None]:
    quote = scanner.take()
    put('"')
    while (char := (yield from scanner.peek())) != quote:
        if char == "":
            raise Malformed
        text = (yield from _escape(scanner)) if char == "\\" else scanner.take_run(_QUOTED[quote])
        put(json.dumps(text, ensure_ascii=False)[1:-1])
    scanner.take()
    put('"')


def _escape(scanner: Scanner) -> Rule[str]:
    """What an escape stands for; one that Python does not know stands for itself."""
    scanner.take()
    char = yield from scanner.peek()
    if not char:
        raise Malformed
    scanner.take()
    digits = ""
    for _ in range(_HEX_DIGITS.get(char, 0)):
        yield from scanner.peek()
        digits += scanner.take()
    if char not in _HEX_DIGITS:
        return _ESCAPES.get(char, f"\\{char}")
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError) as error:
        raise Malformed from error


def _scalar(text: str) -> str:
    """A word or number of Python as JSON writes it."""
    if text in _WORDS or _JSON_NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError as error:
        raise Malformed from error
