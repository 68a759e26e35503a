"""The OpenAPI document as one page of HTML, which needs no scripts and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
:root { color-scheme: light dark; --faint: color-mix(in srgb, CanvasText 60%, Canvas); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.9em ui-monospace, monospace; }
details { border-top: 1px solid color-mix(in srgb, CanvasText 20%, Canvas); padding: 0.4rem 0; }
summary { cursor: pointer; }
summary code { display: inline-block; min-width: 4.5em; font-weight: bold; }
summary code + code { min-width: 17em; }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; }
td { padding: 0.1rem 1.5rem 0.1rem 0; vertical-align: top; }
p, td + td { color: var(--faint); }
"""
_LIMITS: Final = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
}


def docs_page(document: Mapping[str, Any]) -> str:
    """A page that lists every operation of `document`, with the fields of its body."""
    title = f"{document['info']['title']} {document['info']['version']}"
    sections = [
        _section(method, path, operation, document["components"]["schemas"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{_STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(document['info']['description'])} "
        f'<a href="openapi.json">openapi.json</a></p>\n{"".join(sections)}</html>\n'
    )


def _section(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> str:
    keys = [name for needed in operation["security"] for name in needed]
    parts = [
        _table("Parameters", [_parameter(each) for each in operation["parameters"]]),
        *_body(operation.get("requestBody", {"content": {}}), schemas),
        _table("Answers", list(_answers(operation["responses"]))),
        f"<p>Key: {escape(', '.join(keys) or 'none')}</p>\n",
    ]
    return (
        f"<details><summary><code>{method.upper()}</code><code>{escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>\n{''.join(parts)}</details>\n"
    )


def _body(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    for media, content in body["content"].items():
        schema = _resolved(content["schema"], schemas)
        required = schema.get("required", ())
        rows = [
            (name + ("" if name not in required else " *"), _kind(field, schemas))
            for name, field in schema["properties"].items()
        ]
        yield _table(f"Body, {media} (* required)", rows)


def _parameter(parameter: Mapping[str, Any]) -> tuple[str, str]:
    return parameter["name"], f"in {parameter['in']}. {parameter.get('description', '')}"


def _answers(responses: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for status, response in responses.items():
        yield status, f"{response['description']} ({', '.join(response['content'])})"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td><code>{escape(left)}</code><td>{escape(right)}\n" for left, right in rows
    )
    return f"{escape(title)}\n<table>\n{cells}</table>\n"


def _kind(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The type of a field in words: null and the default null, which most have, go unsaid."""
    schema = _resolved(schema, schemas)
    kinds = [_kind(each, schemas) for each in schema.get("anyOf", ())]
    if kinds:
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    items = f" of {_grouped(_kind(schema['items'], schemas))}" if "items" in schema else ""
    limits = [f"{sign} {schema[name]}" for name, sign in _LIMITS.items() if name in schema]
    return ", ".join([schema.get("type", "any") + items, *limits])


def _grouped(kind: str) -> str:
    return f"({kind})" if " or " in kind else kind


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return schema if reference is None else schemas[reference.rpartition("/")[2]]
