"""Message shapes: roles, content forms, parts."""

from __future__ import annotations

from typing import Any

import pytest

from pagemesh.shared.errors import RequestError
from pagemesh.tokenizer_svc.messages import ROLES, content_forms, normalise
from pagemesh.tokenizer_svc.templates import ChatTemplate

STRINGS = dict.fromkeys(ROLES, "string")
EITHER = dict.fromkeys(ROLES, "either")
PARTS = dict.fromkeys(ROLES, "parts")
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

STRING_TEMPLATE = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
EITHER_TEMPLATE = """\
{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""
PARTS_TEMPLATE = """\
{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"""
STRING_SYSTEM_TEMPLATE = """\
{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{% for m in messages if m.role != 'system' %}{% for part in m.content %}{{ part.text }}\
{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "user", "system"),
    [
        (STRING_TEMPLATE, "string", "string"),
        ("{{ messages[0]['content'] }}", "string", "string"),
        ("{{ messages | tojson }}", "string", "string"),
        (EITHER_TEMPLATE, "either", "either"),
        (PARTS_TEMPLATE, "parts", "parts"),
        (STRING_SYSTEM_TEMPLATE, "parts", "string"),
        ("{{ raise_exception('never') }}", "string", "string"),
    ],
)
def test_the_wanted_content_form_is_found_by_role(source: str, user: str, system: str) -> None:
    forms = content_forms(ChatTemplate(source, {}))
    assert (forms["user"], forms["system"]) == (user, system)


@pytest.mark.parametrize(
    ("forms", "content", "expected"),
    [
        (STRINGS, "text", "text"),
        (STRINGS, TWO, "one\ntwo"),
        (STRINGS, ["plain", TWO[0]], "plain\none"),
        (STRINGS, None, ""),
        (STRINGS, [], ""),
        (EITHER, "text", "text"),
        (EITHER, TWO, TWO),
        (PARTS, "text", [{"type": "text", "text": "text"}]),
        (PARTS, TWO, TWO),
    ],
)
def test_content_takes_the_form_the_template_wants(
    forms: dict[str, Any], content: Any, expected: Any
) -> None:
    [message] = normalise([{"role": "user", "content": content}], forms)
    assert message == {"role": "user", "content": expected}


def test_developer_is_system() -> None:
    [message] = normalise([{"role": "developer", "content": "x"}], STRINGS)
    assert message["role"] == "system"


def test_nulls_are_absent_and_other_fields_stay() -> None:
    given = {"role": "assistant", "content": "x", "tool_calls": None, "name": "bob", "id": 7}
    [message] = normalise([given], STRINGS)
    assert message == {"role": "assistant", "content": "x", "name": "bob", "id": 7}
    assert given["tool_calls"] is None


@pytest.mark.parametrize(
    ("message", "naming"),
    [
        ({"role": "robot", "content": "x"}, r"messages\[0\].*role.*'robot'"),
        ({"content": "x"}, r"messages\[0\].*role"),
        ({"role": ["user"], "content": "x"}, r"messages\[0\].*role"),
        ({"role": "user", "content": 5}, r"messages\[0\].*content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"messages\[0\]\.content\[0\].*'image_url'",
        ),
        ({"role": "user", "content": [7]}, r"messages\[0\]\.content\[0\]"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].*text"),
        ({"role": "assistant", "tool_calls": "x"}, r"messages\[0\]\.tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"messages\[0\]\.tool_calls"),
    ],
)
def test_what_cannot_be_a_message_is_named(message: dict[str, Any], naming: str) -> None:
    with pytest.raises(RequestError, match=naming) as caught:
        normalise([message], STRINGS)
    assert (caught.value.status, caught.value.param) == (400, "messages")
