"""What an answer must look like, in the ways that clients ask for it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.schema import GenerationRequest
from pagemesh.shared.structured_outputs import StructuredOutputsParams

MAX_RULE_CHARS: Final = 2**20
# vLLM's older spelling.
_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_WAYS: Final = ("response_format", "structured_outputs", *_GUIDED)
_ways: Final = attrgetter(*_WAYS)
_NOT_ASKED: Final = (None,) * len(_WAYS)
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """None if the answer may be any. Raises RequestError (400) naming the field."""
    if _ways(request) == _NOT_ASKED:
        return None
    given = {name: getattr(request, name) for name in _GUIDED}
    rules: dict[str, dict[str, Any]] = {
        name: {_GUIDED[name]: value} for name, value in given.items() if value is not None
    }
    if request.structured_outputs is not None:
        rules["structured_outputs"] = _newer(request.structured_outputs)
    if request.response_format is not None:
        of_format = _of_format(request.response_format)
        if of_format is not None:
            rules["response_format"] = of_format
    if len(rules) > 1:
        raise bad(next(iter(rules)), f"cannot be combined: {' and '.join(rules)} were given")
    for name, rule in rules.items():
        return _built(name, rule)
    return None


def _built(name: str, rule: dict[str, Any]) -> StructuredOutputsParams:
    try:
        built = StructuredOutputsParams(**rule, given_as=name)
    except ValueError as error:
        raise bad(name, f"is no rule: {error}") from error
    _, text = built.notation_and_text
    if len(text) > MAX_RULE_CHARS:
        raise bad(name, f"has {len(text)} characters; at most {MAX_RULE_CHARS} are taken")
    return built


def _newer(rule: dict[str, Any]) -> dict[str, Any]:
    """vLLM's newer spelling: an object with one kind of rule."""
    given = {name: value for name, value in rule.items() if value not in (None, False)}
    types = {"json": (str, dict), "choice": (list,), "json_object": (bool,)}
    for name, value in given.items():
        if name not in _KINDS:
            raise bad("structured_outputs", f"does not take {name[:40]!r} here")
        if not isinstance(value, types.get(name, (str,))):
            raise bad("structured_outputs", f"has a {name} of the wrong type")
    if not all(isinstance(each, str) for each in given.get("choice", ())):
        raise bad("structured_outputs", "has a choice that is no string")
    return given


def _of_format(response_format: dict[str, Any]) -> dict[str, Any] | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        shown = repr(kind)[:40]
        raise bad(
            "response_format", f"has type {shown}: text, json_object and json_schema are served"
        )
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise bad("response_format", "needs an object in json_schema.schema")
    return {"json": schema}
