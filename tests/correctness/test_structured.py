"""Answers of the real model that must have a form, from the offline class."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from pagemesh import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from pagemesh.shared.errors import RequestError

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "address": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 999}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}


def ruled(seed: int, **rule: Any) -> SamplingParams:
    rules = StructuredOutputsParams(**rule)
    return SamplingParams(temperature=1, seed=seed, max_tokens=90, structured_outputs=rules)


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert {one.finish_reason for output in outputs for one in output.outputs} == {"stop"}
    return [one.text for output in outputs for one in output.outputs]


def test_every_kind_of_rule_beside_one_another_and_a_request_without(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = "Invent a person: "
    [alone] = llm.generate([prompt], free)
    params = [
        ruled(0, json=PERSON),
        ruled(1, regex="[0-9]{3}-[a-z]{2}"),
        ruled(2, choice=["red", "green"]),
        ruled(3, grammar='start: "x" "y"+ "z"'),
        free,
    ]
    *bound, unbound = llm.generate([prompt] * len(params), params)
    person, number, colour, letters = texts(bound)
    jsonschema.validate(json.loads(person), PERSON)
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", number)
    assert colour in ("red", "green")
    assert re.fullmatch("xy+z", letters)
    assert unbound.outputs == alone.outputs


def test_choices_of_a_chat_with_logprobs(llm: LLM) -> None:
    rules = StructuredOutputsParams(json=PERSON)
    params = SamplingParams(
        n=2, temperature=1, seed=5, max_tokens=90, logprobs=1, structured_outputs=rules
    )
    outputs = llm.chat([{"role": "user", "content": "Invent a person."}], params)
    for text in texts(outputs):
        jsonschema.validate(json.loads(text), PERSON)
    for choice in outputs[0].outputs:
        assert len(choice.logprobs or []) == len(choice.token_ids)


def test_a_rule_that_cannot_be_followed_stops_the_call(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: .*cannot be followed"):
        llm.generate(["a", "b"], [ruled(0, choice=["a"]), ruled(0, regex="(")])
