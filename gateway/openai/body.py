"""From a request body to a checked struct: JSON, known fields, types, plain nested values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from pagemesh.gateway.openai.fields import HARMLESS
from pagemesh.shared.errors import RequestError

MAX_DEPTH: Final = 64
_PATH: Final = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
_RAW_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one endpoint. `on_unknown` hears each field nobody knows."""

    def __init__(
        self,
        kind: type[T],
        refused: Mapping[str, tuple[Any, ...]],
        on_unknown: Callable[[str], None],
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_fields__)
        self._refused = refused
        self._on_unknown = on_unknown

    def decode(self, body: bytes) -> T:
        """Raises RequestError (400) naming the field at fault."""
        try:
            for name, raw in _RAW_OBJECT.decode(body).items():
                if name not in self._known:
                    self._check_other(name, raw)
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _type_error(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(body, str(error)) from error
        except RecursionError as error:
            raise _malformed(body, "it is nested too deeply") from error

    def _check_other(self, name: str, raw: msgspec.Raw) -> None:
        if name in HARMLESS:
            return
        if name not in self._refused:
            self._on_unknown(name)
        elif msgspec.json.decode(raw) not in (None, *self._refused[name]):
            raise RequestError(
                f"{name} with this value is not supported here. Leave it out.",
                code="unsupported_parameter",
                param=name,
            )


def _malformed(body: bytes, reason: str) -> RequestError:
    if not body.strip():
        reason = "it is empty"
    elif rb"\ud" in body.lower():
        reason += " (an escape of half a surrogate pair is not text)"
    return RequestError(f"The body is not valid JSON: {reason}", code="invalid_json")


def _type_error(text: str) -> RequestError:
    found = _PATH.search(text)
    # `[...]` stands for any key or element, which clients cannot look up.
    path = found["path"].partition("[...]")[0] if found else ""
    reason = text[: found.start()] if found else text
    missing = _MISSING.match(reason)
    if missing:
        param = f"{path}.{missing['name']}" if path else missing["name"]
        code = "missing_required_parameter"
    else:
        param, code = path, "invalid_type"
    shown = f"{param}: {reason}" if param else f"The body is not usable: {reason}"
    return RequestError(shown, code=code, param=param or None)


def check_plain(value: object, param: str, depth: int = 0) -> None:
    """Refuse what would not survive the mesh's messages: deep nesting, integers over 64 bits."""
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{param} is nested deeper than {MAX_DEPTH} levels", code="invalid_value", param=param
        )
    if isinstance(value, dict):
        for child in value.values():
            check_plain(child, param, depth + 1)
    elif isinstance(value, list):
        for child in value:
            check_plain(child, param, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError(
            f"{param} holds an integer over 64 bits", code="invalid_value", param=param
        )
