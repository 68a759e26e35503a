"""Schemas as clients write them, drawn by Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
_NAMES = st.sampled_from(["name", "age", "tags", "größe", 'a "b"', "x y", "$id2"])
_COUNTS = st.integers(0, 3)


def _bounded(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """Neither, either, or both of two bounds, in their order."""
    both = st.tuples(values, values).map(sorted)
    kept = st.sets(st.sampled_from([low, high]))
    return st.builds(
        lambda pair, names: {n: v for n, v in zip((low, high), pair, strict=True) if n in names},
        both,
        kept,
    )


STRINGS = st.one_of(
    _bounded("minLength", "maxLength", _COUNTS),
    st.sampled_from([{"pattern": "^[a-c]{2,4}$"}, {"pattern": "^(yes|no)$"}]),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
        lambda name: {"format": name}
    ),
).map(lambda more: {"type": "string", **more})
INTEGERS = _bounded("minimum", "maximum", st.integers(-1000, 1000)).map(
    lambda more: {"type": "integer", **more}
)
# llguidance lets 0 pass between an exclusive bound of 0 and a fraction.
NUMBERS = (
    _bounded("exclusiveMinimum", "maximum", st.sampled_from([-10.5, 0.25, 3, 1e6]))
    .filter(lambda more: len(set(more.values())) == len(more))
    .map(lambda more: {"type": "number", **more})
)
PLAIN = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"const": "só"},
        {"enum": ["red", 7, None, {"deep": [1, 2]}]},
        {"type": ["integer", "null"]},
    ]
)


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    of_any_length = st.builds(
        lambda schema, bounds: {"type": "array", "items": schema, **bounds},
        items,
        _bounded("minItems", "maxItems", _COUNTS),
    )
    tuples = st.lists(items, min_size=1, max_size=2).map(
        lambda schemas: {
            "type": "array",
            "prefixItems": schemas,
            "items": False,
            "minItems": len(schemas),
        }
    )
    return of_any_length | tuples


def _objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda properties, wanted, more: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in wanted],
            "additionalProperties": more,
        },
        st.dictionaries(_NAMES, values, max_size=3),
        st.sets(_NAMES),
        st.just(False) | values,
    )


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    choices = st.lists(inner, min_size=2, max_size=2).map(lambda schemas: {"anyOf": schemas})
    return _arrays(inner) | _objects(inner) | choices


SCHEMAS = st.recursive(STRINGS | INTEGERS | NUMBERS | PLAIN, _nested, max_leaves=5)
TREES: Schema = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
