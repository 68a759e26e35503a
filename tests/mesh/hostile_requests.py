"""Malformed and boundary requests as bytes, drawn from a seed. Nothing here sends them.

Bodies start from the fields that `/openapi.json` knows: what is described there is attacked.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any, Final, NamedTuple

USER: Final = [{"role": "user", "content": "Hi"}]
# So little work that thousands of good ones do not take long.
SMALL: Final = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1}
# What a field may hold as JSON text, wrongly or at an edge.
ODD_VALUES: Final = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "-0.0", "1e-400", "0.1e1", "01", "+1"),
    *("0", "-1", "2147483647", "2147483648", "-2147483649", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1." + "3" * 400),
    *("null", "true", "[]", "{}", '""', '"x"', "[[]]", "[null]", "[{}]", '[""]', '{"":null}'),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '["\\u0000"]', '"\\ud83d\\ude00"', '"\\q"'),
    *('"\'; DROP TABLE"', '"{{ 7 * 7 }}"', '"../../etc/passwd"', '"\\r\\nX: y"', '"\u202e\ufeff"'),
    *('{"type":"json_schema"}', '{"type":"json_object"}', '{"type":5}', '[{"role":"user"}]'),
    *('[{"type":"function","function":{"name":"f"}}]', '[{"role":"user","content":[{"type":1}]}]'),
    *("[" * 200 + "]" * 200, '{"a":' * 100 + "1" + "}" * 100, "[" * 5000, '"' + "a" * 5000 + '"'),
)
CONTENT_TYPES: Final = (
    *("text/plain", "application/xml", "application/json; charset=utf-16", "multipart/form-data"),
    *(
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "",
        "\xff",
        "a" * 500,
    ),
)


class Hostile(NamedTuple):
    """One connection: what it writes, and then `reads` an answer, `leaves` at once, or `lingers` a
    moment, since the server may be waiting for more."""

    about: str
    data: bytes
    end: str = "reads"


class Target(NamedTuple):
    """An operation of the document."""

    method: str
    path: str
    fields: tuple[str, ...]
    required: tuple[str, ...]


def targets_of(document: Mapping[str, Any]) -> list[Target]:
    """All operations, with the fields of their bodies. /ready may say no on a busy machine."""
    schemas = document["components"]["schemas"]
    return [
        _target(method.upper(), path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if path != "/ready"
    ]


def _target(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Target:
    for content in operation.get("requestBody", {"content": {}})["content"].values():
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        return Target(method, path, tuple(schema["properties"]), tuple(schema.get("required", ())))
    return Target(method, path, (), ())


def hostile(seed: str, targets: list[Target]) -> Hostile:
    """The same for the same `seed`."""
    random = Random(seed)
    target = random.choice([each for each in targets if each.fields])
    if random.random() < 0.6:
        return _with_body(random, target)
    return random.choice(_FRAMINGS)(random, random.choice(targets))


def head(target: Target, *headers: str, length: int | None = None) -> bytes:
    lines = [f"{target.method} {target.path.replace('{', '').replace('}', '')} HTTP/1.1", "Host: x"]
    lines += [*headers, "Connection: close"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _posted(about: str, target: Target, body: bytes, *headers: str) -> Hostile:
    return Hostile(about, head(target, *headers, length=len(body)) + body)


def _good(target: Target) -> dict[str, str]:
    """JSON texts of fields. Not all targets find them good."""
    values: dict[str, Any] = {"messages": USER, "prompt": "Hi", "input": "Hi", "tokens": [5]}
    values |= dict.fromkeys(target.required, "x") | values
    chosen = {name: value for name, value in values.items() if name in target.required}
    chosen |= {name: value for name, value in SMALL.items() if name in target.fields}
    return {name: json.dumps(value) for name, value in chosen.items()}


def _with_body(random: Random, target: Target) -> Hostile:
    fields = _good(target)
    for _ in range(random.choice((0, *(1,) * 8, 2, 2, 4, 4))):
        fields[random.choice(target.fields)] = random.choice(ODD_VALUES)
    pairs = [f"{json.dumps(name)}:{value}" for name, value in fields.items()]
    if pairs and random.random() < 0.1:
        pairs += random.choices(pairs, k=3)
    body = ("{" + ",".join(pairs) + "}").encode("utf-8", "surrogatepass")
    mangle = random.choice((_as_is,) * 6 + _MANGLES)
    return mangle(random, target, body)


def _as_is(_: Random, target: Target, body: bytes) -> Hostile:
    return _posted("odd fields", target, body, "Content-Type: application/json")


def _flipped(random: Random, target: Target, body: bytes) -> Hostile:
    data = bytearray(body or b"{}")
    for _ in range(random.randint(1, 8)):
        data[random.randrange(len(data))] = random.randrange(256)
    return _posted("flipped bytes", target, bytes(data))


def _cut(random: Random, target: Target, body: bytes) -> Hostile:
    return _posted("half a body", target, body[: random.randrange(len(body))])


def _trailing(random: Random, target: Target, body: bytes) -> Hostile:
    more = random.choice((b"x", b"{}", b"\0", b"]", b"\xff", b" " * 100, body))
    return _posted("something behind the body", target, body + more)


def _encoded(random: Random, target: Target, body: bytes) -> Hostile:
    charset = random.choice(("utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp500"))
    return _posted(charset, target, body.decode("utf-8", "ignore").encode(charset, "replace"))


def _typed(random: Random, target: Target, body: bytes) -> Hostile:
    kind = random.choice(CONTENT_TYPES)
    return _posted("content type", target, body, f"Content-Type: {kind}")


def _compressed(random: Random, target: Target, body: bytes) -> Hostile:
    packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}
    name = random.choice(("gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "made-up"))
    data = packed.get(name, body)
    if random.random() < 0.4:
        data = data[: len(data) // 2]
    return _posted(f"content encoding {name}", target, data, f"Content-Encoding: {name}")


@cache
def _bomb_of(size_bytes: int) -> bytes:
    return zlib.compress(b"[" * size_bytes)


def _bomb(random: Random, target: Target, _: bytes) -> Hostile:
    """A megabyte or forty, in some kilobytes."""
    data = _bomb_of(random.choice((2**20, 40 * 2**20)))
    return _posted("bomb", target, data, "Content-Encoding: deflate")


def _chunked(random: Random, target: Target, body: bytes) -> Hostile:
    size = random.choice(
        (f"{len(body):x}", "-1", "zz", "", "0x5", "f" * 40, "5;" + "e" * 9000, " 5", "5 ")
    )
    ending = random.choice(("\r\n0\r\n\r\n", "\n0\n\n", "", "\r\n0\r\nbad trailer\r\n\r\n", "0"))
    data = head(target, "Transfer-Encoding: chunked") + f"{size}\r\n".encode() + body
    return Hostile("chunks", data + ending.encode(), random.choice(("lingers", "leaves")))


def _mislengthed(random: Random, target: Target, body: bytes) -> Hostile:
    length = random.choice(
        (str(len(body) + 9), str(len(body) // 2), "-1", "abc", "", "9" * 30, "+5", "5, 6", "0x5")
    )
    twice = random.choice(((), ("Content-Length: 1",), ("Transfer-Encoding: chunked",)))
    data = head(target, f"Content-Length: {length}", *twice) + body
    return Hostile("length", data, random.choice(("lingers", "leaves")))


_Mangle = Callable[[Random, Target, bytes], Hostile]
_MANGLES: Final[tuple[_Mangle, ...]] = (
    *(_flipped, _cut, _trailing, _encoded, _typed, _compressed, _chunked, _mislengthed, _bomb),
)


def _odd_request_line(random: Random, target: Target) -> Hostile:
    path = target.path
    line = random.choice(
        (
            *("", " ", "GET", f"GET {path}", f"get {path} HTTP/1.1", f"GET {path} HTTP/9.9"),
            *(f"GET {path}?{'a' * 20_000} HTTP/1.1", f"GET {path}\0 HTTP/1.1", "\x16\x03\x01\x02"),
            *(f"GET http://other{path} HTTP/1.1", "OPTIONS * HTTP/1.1", "CONNECT x:1 HTTP/1.1"),
            *("PRI * HTTP/2.0", f"GET {path}/%ff%00%2e HTTP/1.1", f"GET //{path} HTTP/1.1"),
            *(f"GET {path}/../../{path} HTTP/1.1", "GET /v1/models/%ed%a0%80 HTTP/1.1"),
            *("GET /v1/models/" + "x/" * 2000 + " HTTP/1.1", f"GET {path}?a=%zz&[]=&=;# HTTP/1.1"),
        )
    )
    data = line.encode() + b"\r\nHost: x\r\nConnection: close\r\n\r\n"
    return Hostile("request line", data, "lingers")


def _odd_headers(random: Random, target: Target) -> Hostile:
    header = random.choice(
        (
            *(
                "X: " + "a" * 9000,
                "X" * 9000 + ": a",
                "no colon",
                ": no name",
                "X : y",
                " X: folded",
            ),
            *("X: a\0b", "X: a\rb", "X: a\nb", "X\xff: \xff", "Host: y", "Host: ", "X: \x7f"),
            *("Expect: 100-continue", "Expect: 200-maybe", "Upgrade: websocket", "Upgrade: h2c"),
            *("Connection: upgrade, close", "TE: gzip", "Authorization: Bearer " + "k" * 5000),
            *(
                "X-Request-Id: " + "i" * 5000,
                "X-Request-Id: a\tb",
                "Origin: null",
                "Range: bytes=5-",
            ),
            *("Access-Control-Request-Headers: " + "h," * 2000, "Cookie: " + "c=d;" * 1000),
            *("Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked", "X-Api-Key: \xe9"),
        )
    )
    headers = [header] * random.choice((1, 1, 1, 3, 200))
    return Hostile("headers", head(target, *headers, length=2) + b"{}", "lingers")


def _odd_method(random: Random, target: Target) -> Hostile:
    methods = (
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "BREW",
        "M" * 99,
    )
    other = target._replace(method=random.choice(methods))
    return _posted("method", other, b"{}")


def _abandoned(random: Random, target: Target) -> Hostile:
    data = head(target, length=10**6) + b'{"prompt":"'
    return Hostile("abandoned", data[: random.randrange(1, len(data))], "leaves")


def _noise(random: Random, _: Target) -> Hostile:
    return Hostile("noise", random.randbytes(random.randrange(1, 300)), "lingers")


_FRAMINGS: Final[tuple[Callable[[Random, Target], Hostile], ...]] = (
    *(_odd_request_line, _odd_headers, _odd_method, _abandoned, _noise),
)
