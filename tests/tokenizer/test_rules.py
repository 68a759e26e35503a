"""Rules that clients write are tried in a process that may end. The vocabulary is single bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemesh.shared.errors import RequestError
from pagemesh.shared.settings import Settings
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.tokenizer_svc.rule_process import TOO_LARGE
from pagemesh.tokenizer_svc.rules import RuleProcessEnded, Rules
from pagemesh.tokenizer_svc.text_model import TextModel

CHAIN = "".join(f"a{n}: a{n + 1}\n" for n in range(50_000))


@pytest.fixture(scope="module")
def rules(byte_level: TextModel) -> Rules:
    return byte_level.rules


def check(rules: Rules, **rule: Any) -> None:
    rules.check(StructuredOutputsParams(**rule, given_as="guided"))


def test_what_can_be_followed_passes_again_and_again(rules: Rules) -> None:
    for _ in range(2):
        check(rules, json={"type": "object", "properties": {"a\n": {"type": "string"}}})
        check(rules, choice=["cat", "dög\n"])


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(" * 50_000}, "invalid regex"),
        ({"json": "{"}, "EOF while parsing"),
        ({"json": {"type": "object", "properties": {"foo": "bar"}}}, "schema"),
        ({"grammar": "no grammar"}, "convert the grammar"),
        ({"grammar": f'start: a0\n{CHAIN}a50000: "x"'}, TOO_LARGE),
        ({"json": {"type": "integer", "multipleOf": 1_000_003}}, TOO_LARGE),
        ({"choice": [f"word {n}" for n in range(90_000)]}, TOO_LARGE),
        ({"json": {"$ref": "#"}}, "NoExtension"),
    ],
    ids=["regex", "quoted", "text", "schema", "grammar", "stack", "time", "choices", "nothing"],
)
def test_what_cannot_is_refused_and_others_pass(
    rules: Rules, rule: dict[str, Any], told: str
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="guided cannot be followed") as refused:
            check(rules, **rule)
        assert (refused.value.status, refused.value.param) == (400, "guided")
        assert told in str(refused.value)
        assert len(str(refused.value)) < 1000
    check(rules, regex="[0-9]{3}")


def test_the_process_is_started_again_and_leaves_with_its_owner(
    byte_level: TextModel, byte_level_settings: Settings
) -> None:
    before = set(psutil.Process().children())
    rules = Rules(Path(byte_level_settings.model.model), byte_level.prepared)
    check(rules, regex="a")
    [process] = set(psutil.Process().children()) - before
    process.kill()
    process.wait(10)
    check(rules, regex="a")
    check(rules, regex="b")
    [process] = set(psutil.Process().children()) - before
    del rules
    assert not process.is_running()


def test_a_vocabulary_that_cannot_be_read_is_told(
    byte_level: TextModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rules = Rules(tmp_path_factory.mktemp("empty"), byte_level.prepared)
    with pytest.raises(RuleProcessEnded, match="ended with 1"):
        check(rules, regex="a")
