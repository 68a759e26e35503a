"""The OpenAPI 3.1 document of a gateway, made of its operations and of the structs that validate
their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from pagemesh.shared.access import Access, Audience, audience_of

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
FORM: Final = "multipart/form-data"
# What a request may come to that goes to an engine.
GENERATES: Final = (400, 404, 413, 429, 503, 504)

_SCHEMAS: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"{(\w+)}")
_NULLABLE_TEXT: Final = {"type": ["string", "null"]}
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Every refusal, and the last event but one of a stream that fails.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "examples": ["invalid_request_error"]},
                "param": {**_NULLABLE_TEXT, "description": "The field at fault."},
                "code": _NULLABLE_TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Every refusal of these routes, and the last event of a stream that fails.",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


_References = Mapping[type[Struct], dict[str, Any]]


class Operation(Struct, frozen=True, kw_only=True):
    """One method of one path, in the spelling that the document shows.

    `request`: the struct of the body, sent as `takes`. `answers`: the media types of the good
    answer, which `answer` describes in words; as JSON it is a `shape`, or of that type; `also`:
    other statuses that are answered so, in words. `refusals`: the statuses of errors, beside those
    that any operation may have; `error`: the schema of these. `query`: parameters, and what they
    mean.
    """

    method: str
    path: str
    summary: str
    answer: str
    request: type[Struct] | None = None
    takes: str = JSON
    answers: tuple[str, ...] = (JSON,)
    shape: type[Struct] | str = "object"
    status: int = 200
    also: dict[int, str] = {}
    refusals: tuple[int, ...] = ()
    error: str = "Error"
    query: dict[str, str] = {}


def openapi_document(
    operations: Iterable[Operation], access: Access, version: str
) -> dict[str, Any]:
    """Plain values, for `msgspec.json.encode`. `access` says who needs which key."""
    operations = list(operations)
    structs = sorted(_structs(operations), key=lambda struct: struct.__qualname__)
    shown, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    references = dict(zip(structs, shown, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _described(operation, access, references)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pagemesh",
            "version": version,
            "description": (
                "OpenAI's REST API, and Anthropic's messages. Paths work with and without /v1, and "
                "with a slash at the end. "
                "A field that is null is a field left out; unknown fields are ignored."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


_EITHER: Final = "The same keys, in the way of Anthropic's clients."
_SECURITY_SCHEMES: Final = {
    "key": {"type": "http", "scheme": "bearer", "description": "One of --api-key, if any is set."},
    "admin": {"type": "http", "scheme": "bearer", "description": "One of --admin-key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": _EITHER},
}


def _structs(operations: Iterable[Operation]) -> set[type[Struct]]:
    used = [each for operation in operations for each in (operation.request, operation.shape)]
    return {each for each in used if isinstance(each, type)}


def _described(operation: Operation, access: Access, references: _References) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": _responses(operation, access, references),
        "security": _security(operation.path, access),
    }
    if operation.request is not None:
        content = {operation.takes: {"schema": references[operation.request]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path.removeprefix("/v1"))
    return "_".join([operation.method.lower(), *words])


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]
    in_query = [
        {"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}}
        for name, meaning in operation.query.items()
    ]
    return in_path + in_query


def _responses(operation: Operation, access: Access, references: _References) -> dict[str, Any]:
    good = {operation.status: operation.answer, **operation.also}
    others = [] if access.is_open(operation.path) else [401]
    others += [] if operation.request is None else [415]
    responses = {status: _good(operation, meaning, references) for status, meaning in good.items()}
    responses |= {
        status: _refusal(status, operation.error) for status in (*operation.refusals, *others)
    }
    return {str(status): responses[status] for status in sorted(responses)}


def _good(operation: Operation, meaning: str, references: _References) -> dict[str, Any]:
    shape = operation.shape
    whole = {"type": shape} if isinstance(shape, str) else references[shape]
    content = {media: _content(media, whole) for media in operation.answers}
    return {"description": meaning, "content": content}


def _content(media: str, whole: dict[str, Any]) -> dict[str, Any]:
    """A schema of events would be one of each event."""
    if media == EVENTS:
        return {}
    return {"schema": whole if media == JSON else {"type": "string"}}


def _refusal(status: int, name: str) -> dict[str, Any]:
    error = {"$ref": _SCHEMAS.format(name=name)}
    return {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": error}}}


def _security(path: str, access: Access) -> list[dict[str, list[str]]]:
    """An empty requirement: without a key."""
    if access.is_open(path):
        return []
    audience = audience_of(path)
    if audience is Audience.ADMINS:
        return [{"admin": []}, {"x-api-key": []}]
    admins: list[dict[str, list[str]]] = [{"admin": []}] if audience is Audience.BOTH else []
    return [{"key": []}, *admins, {"x-api-key": []}, *([] if access.others else [{}])]
