"""How a model marks calls and reasoning in its text: which parsers there are, and which one the
chat template asks for."""

from __future__ import annotations

from typing import Final, NamedTuple

NONE: Final = "none"

# By parser, what a decoder must leave in the text even where it is a special token.
TOOL_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "hermes": ("<tool_call>", "</tool_call>"),
    "json": (),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}

# By parser, the tags around the reasoning.
REASONING_TAGS: Final[dict[str, tuple[str, str]]] = {
    "mistral": ("[THINK]", "[/THINK]"),
    "think": ("<think>", "</think>"),
}

# What a template says of the format that its model was trained on; the first that is found counts.
_TOOL_SIGNS: Final = (
    ("<｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("dictionary of argument name", "llama3_json"),
    # XML inside the same tags: Qwen3-Coder and GLM, which none of the parsers reads.
    ("<function=", NONE),
    ("<arg_key>", NONE),
    ("<tool_call>", "hermes"),
)


class TextParsers(NamedTuple):
    """The parsers of a model's answers, by name, or "none".

    `reasoning_end_id` is the token that closes the reasoning, if one token does. By it reasoning
    tokens are counted.
    """

    tools: str = NONE
    reasoning: str = NONE
    reasoning_end_id: int | None = None


def marks_of(parsers: TextParsers) -> tuple[str, ...]:
    """What must stay in the text for `parsers` to find."""
    return TOOL_MARKS.get(parsers.tools, ()) + REASONING_TAGS.get(parsers.reasoning, ())


def tool_parser_for(template: str, *, knows_tools: bool) -> str:
    """`knows_tools`: whether the template has words of its own for tools. One that has none is
    given them in the system message, in the words of Hermes."""
    if not knows_tools:
        return "hermes"
    return next((parser for sign, parser in _TOOL_SIGNS if sign in template), "json")


def reasoning_parser_for(template: str) -> str:
    """By the tags that the template writes or looks for."""
    found = (name for name, tags in REASONING_TAGS.items() if any(tag in template for tag in tags))
    return next(found, NONE)
