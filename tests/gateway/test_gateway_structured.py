"""The ways to ask for a form of the answer, and what is refused before it leaves the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import FakeTokenizer, Gateway

from pagemesh.shared.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object"}
TEXT = '{"type":"object"}'


def of(given_as: str, **rule: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**rule, given_as=given_as)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        (
            {"response_format": {"type": "json_object"}},
            of("response_format", json_object=True),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
                }
            },
            of("response_format", json=TEXT),
        ),
        ({"guided_json": SCHEMA}, of("guided_json", json=TEXT)),
        ({"guided_json": TEXT}, of("guided_json", json=TEXT)),
        ({"guided_regex": "a+"}, of("guided_regex", regex="a+")),
        ({"guided_choice": ["a", "b"]}, of("guided_choice", choice=["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, of("guided_grammar", grammar='root ::= "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            of("structured_outputs", json=TEXT),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            of("structured_outputs", json_object=True),
        ),
    ],
)
async def test_what_is_asked_for_travels_down(
    gateway: Gateway,
    tokenizer: FakeTokenizer,
    fields: dict[str, Any],
    rule: StructuredOutputsParams | None,
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi!"}], **fields}
    status, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200, answer
    [talk] = tokenizer.talks.values()
    assert talk.generate.params.structured_outputs == rule


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_its_name(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "prompt": "Hi!", **fields}
    status, answer = await gateway.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
