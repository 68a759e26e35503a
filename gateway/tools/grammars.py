"""How models write calls into their text. Each grammar is a rule over a whole answer.

Formats with tags of their own take calls of any name; those without must name a tool of the
request, or any JSON would be a call.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from pagemesh.gateway.tools.json_rules import calls, streamed_object
from pagemesh.gateway.tools.scanner import Malformed, Rule, Scanner

_NOT_ANGLE: Final = re.compile("[^<]*")
_NOT_BRACKET: Final = re.compile(r"[^\[]*")
_NOT_JSON: Final = re.compile(r"[^{\[`<]*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_LETTERS: Final = re.compile("[a-z]+")
_LINE: Final = re.compile(r"[^\n<]+")
_NOT_SEPARATOR: Final = re.compile("[^<{]+")
_PYTHON_TAG: Final = "<|python_tag|>"

# -- hermes ---------------------------------------------------------------------------------------


def hermes(scanner: Scanner, _: Container[str]) -> Rule[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM2."""
    while (yield from scanner.content_run(_NOT_ANGLE)):
        yield from scanner.attempt(_hermes_calls(scanner))


def _hermes_calls(scanner: Scanner) -> Rule[None]:
    """A tag that is not closed ends where the next one opens."""
    yield from scanner.literal("<tool_call>")
    tag = "<tool_call>"
    while tag == "<tool_call>":
        yield from scanner.space()
        yield from calls(scanner, None)
        yield from scanner.space()
        tag = yield from scanner.one_of(("</tool_call>", "<tool_call>"))
    scanner.settle()


# -- json and llama3_json -------------------------------------------------------------------------


def plain_json(scanner: Scanner, tools: Container[str]) -> Rule[None]:
    """{"name": …, "parameters": {…}}, a list of such, fenced (```json), behind <|python_tag|>, or
    several with a semicolon between them."""
    while (yield from scanner.content_run(_NOT_JSON)):
        yield from scanner.attempt(_json_calls(scanner, tools))


def _json_calls(scanner: Scanner, tools: Container[str]) -> Rule[None]:
    char = yield from scanner.peek()
    if char == "`":
        yield from scanner.literal("```")
        yield from scanner.run(_LETTERS)
        yield from scanner.space()
    elif char == "<":
        yield from scanner.literal(_PYTHON_TAG)
        yield from scanner.space()
    yield from calls(scanner, tools)
    while (yield from scanner.space()) == ";":
        scanner.take()
        yield from scanner.space()
        yield from calls(scanner, tools)
    if char == "`":
        yield from scanner.literal("```")
        scanner.settle()
    else:
        raise Malformed  # only white space is held, which is nobody's


# -- mistral --------------------------------------------------------------------------------------


def mistral(scanner: Scanner, _: Container[str]) -> Rule[None]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}], later [TOOL_CALLS]name[ARGS]{…}."""
    while (yield from scanner.content_run(_NOT_BRACKET)):
        yield from scanner.attempt(_mistral_calls(scanner))


def _mistral_calls(scanner: Scanner) -> Rule[None]:
    yield from scanner.literal("[TOOL_CALLS]")
    if (yield from scanner.space()) in ("[", "{"):
        yield from calls(scanner, None)
    else:
        yield from _mistral_named_call(scanner)


def _mistral_named_call(scanner: Scanner) -> Rule[None]:
    name = yield from scanner.run(_NAME)
    while (yield from scanner.peek()) == "[":
        if (yield from scanner.one_of(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
            yield from scanner.run(_NAME)
    if (yield from scanner.space()) != "{" or not name:
        raise Malformed
    scanner.start_call(name)
    yield from streamed_object(scanner)


# -- deepseek -------------------------------------------------------------------------------------

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"


def deepseek(scanner: Scanner, _: Container[str]) -> Rule[None]:
    """begin, then function, separator, name and fenced JSON (V3, R1) or name, separator and JSON
    (V3.1) for each call."""
    while (yield from scanner.content_run(_NOT_ANGLE)):
        yield from scanner.attempt(_deepseek_calls(scanner))


def _deepseek_calls(scanner: Scanner) -> Rule[None]:
    tag = yield from scanner.one_of((_CALLS_BEGIN, _CALL_BEGIN))
    if tag == _CALLS_BEGIN:
        yield from scanner.space()
        yield from scanner.literal(_CALL_BEGIN)
    while tag != _CALLS_END:
        yield from _deepseek_call(scanner)
        yield from scanner.space()
        tag = yield from scanner.one_of((_CALL_BEGIN, _CALLS_END))
    scanner.settle()


def _deepseek_call(scanner: Scanner) -> Rule[None]:
    name = (yield from scanner.run(_NOT_SEPARATOR)).strip()
    yield from scanner.literal(_SEPARATOR)
    is_fenced = (yield from scanner.space()) != "{"
    if is_fenced:
        name = (yield from scanner.run(_LINE)).strip()
        yield from scanner.space()
        yield from scanner.literal("```json")
        yield from scanner.space()
    if (yield from scanner.peek()) != "{" or not name:
        raise Malformed
    scanner.start_call(name)
    yield from streamed_object(scanner)
    yield from scanner.space()
    if is_fenced:
        yield from scanner.literal("```")
        yield from scanner.space()
    yield from scanner.literal(_CALL_END)
    scanner.settle()
