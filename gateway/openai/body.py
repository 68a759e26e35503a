"""From a request body to a checked struct: JSON, known fields, types, plain nested values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from pagemesh.gateway.offload import LARGE_BYTES, Offload
from pagemesh.gateway.openai.fields import HARMLESS
from pagemesh.shared.errors import RequestError

SHORT_BYTES: Final = 8 * 2**10
MAX_DEPTH: Final = 64
MAX_FIELDS: Final = 1024
MAX_STRINGS: Final = 2**18
# Values within the messages, or the template options, of one request.
MAX_VALUES: Final = 2**17
_IDS: Final = re.compile(rb"[\s\[]+-?\d")
_PATH: Final = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
_RAW_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


def check_structure(body: bytes) -> None:
    """Count strings (keys too), lists and objects without making them: each costs an object.

    Raises RequestError (400) over the limits. Of what is no JSON the counts mean nothing.
    """
    if len(body) <= LARGE_BYTES:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_strings = bare.count(b'"') // 2
    if n_strings > MAX_STRINGS:
        raise RequestError(f"The body holds {n_strings} strings; {MAX_STRINGS} are taken")
    outside = b"".join(bare.split(b'"')[::2])
    n_containers = outside.count(b"[") + outside.count(b"{")
    if n_containers > MAX_VALUES:
        raise RequestError(
            f"The body holds {n_containers} lists and objects; {MAX_VALUES} are taken"
        )


class IdLimit(msgspec.Struct, frozen=True):
    """How many token ids a list of `field` may hold. `check(limit, n_lists, longest)` raises when
    those are too many lists, or the longest has too many ids."""

    field: str
    limit: int
    check: Callable[[int, int, int], None]

    def check_raw(self, raw: msgspec.Raw) -> None:
        """Count before decoding: a list of ids too long is not worth a Python integer for each."""
        body = bytes(raw)
        if _IDS.match(body):
            lists = [part.rpartition(b"[")[2] for part in body.split(b"]")]
            longest = max(ids.count(b",") + 1 for ids in lists)
            self.check(self.limit, max(body.count(b"[") - 1, 1), longest)


def is_short(body: bytes, limit_tokens: int | None) -> bool:
    """So short that no count of anything in it, its token ids too, can be over a limit."""
    return len(body) <= SHORT_BYTES and (limit_tokens is None or len(body) <= 2 * limit_tokens)


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one endpoint."""

    def __init__(self, kind: type[T], refused: Mapping[str, tuple[Any, ...]]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        plain = msgspec.defstruct("Plain", (), bases=(kind,), forbid_unknown_fields=True)
        self._plain_decoder = msgspec.json.Decoder(cast("type[T]", plain))
        self._known = frozenset(kind.__struct_fields__)
        self._refused = refused

    def decode(self, body: bytes, id_limit: IdLimit | None = None) -> tuple[T, list[str]]:
        """The struct, and the names of the fields nobody knows.

        Raises RequestError (400) naming the field at fault.
        """
        if is_short(body, None if id_limit is None else id_limit.limit):
            # Most bodies hold nothing that has to be looked at by name. Others are read again.
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return self._plain_decoder.decode(body), []
        check_structure(body)
        try:
            fields = _RAW_OBJECT.decode(body)
            if len(fields) > MAX_FIELDS:
                raise RequestError(f"The body has {len(fields)} fields; {MAX_FIELDS} are taken")
            if id_limit is not None and id_limit.field in fields:
                id_limit.check_raw(fields[id_limit.field])
            others = fields.keys() - self._known - HARMLESS
            for name in others & self._refused.keys():
                self._check_refused(name, fields[name])
            return self._decoder.decode(body), sorted(others - self._refused.keys())
        except msgspec.ValidationError as error:
            raise _type_error(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(body, str(error)) from error
        except RecursionError as error:
            raise _malformed(body, "it is nested too deeply") from error

    def _check_refused(self, name: str, raw: msgspec.Raw) -> None:
        if msgspec.json.decode(raw) not in (None, *self._refused[name]):
            raise RequestError(
                f"{name} with this value is not supported here. Leave it out.",
                code="unsupported_parameter",
                param=name,
            )


class BodyReader(Generic[T]):
    """Decodes large bodies beside the loop. `on_unknown` hears each field nobody knows."""

    def __init__(
        self, decoder: BodyDecoder[T], offload: Offload, on_unknown: Callable[[str], None]
    ) -> None:
        self._decoder = decoder
        self._offload = offload
        self._on_unknown = on_unknown

    async def read(self, body: bytes, id_limit: IdLimit | None = None) -> T:
        """Raises RequestError (400) naming the field at fault."""
        if len(body) > LARGE_BYTES:
            made_of = self._decoder.decode, body, id_limit
            decoded, unknown = await self._offload.run(len(body), *made_of)
        else:
            decoded, unknown = self._decoder.decode(body, id_limit)
        for name in unknown:
            self._on_unknown(name)
        return decoded


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


def check_plain(value: object, param: str, left: int = MAX_VALUES, depth: int = 0) -> int:
    """Refuse what would not survive the mesh's messages: deep nesting, integers over 64 bits.

    Returns how many more values the request may hold of the `left` ones.
    """
    if depth > MAX_DEPTH:
        raise _not_plain(param, f"is nested deeper than {MAX_DEPTH} levels")
    if left == 0:
        raise _not_plain(param, f"holds more values than a request may ({MAX_VALUES})")
    left -= 1
    if isinstance(value, dict):
        for child in value.values():
            left = check_plain(child, param, left, depth + 1)
    elif isinstance(value, list):
        for child in value:
            left = check_plain(child, param, left, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _not_plain(param, "holds an integer over 64 bits")
    return left


def _not_plain(param: str, fault: str) -> RequestError:
    return RequestError(f"{param} {fault}", code="invalid_value", param=param)
