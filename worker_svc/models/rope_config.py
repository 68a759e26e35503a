"""Rotary embedding parameters as config.json states them, in the old and in the new spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagemesh.shared.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """`kind` is default, linear, llama3, yarn or dynamic; the other fields apply where it says so.

    Dynamic NTK scaling begins past max_position_embeddings. No sequence here is longer, so its
    frequencies are the default ones.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


_KINDS: Final = ("default", "linear", "llama3", "yarn", "dynamic")
_KNOWN_KEYS: Final[dict[str, set[str]]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_REQUIRED_KEYS: Final[dict[str, set[str]]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
}


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises StartupError on a kind or a key that is not implemented.
    """
    stated = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise StartupError("config.json: the rope parameters must be an object")
    given = dict(stated)
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    theta = given.pop("rope_theta", raw.get("rope_theta"))
    partial = given.pop("partial_rotary_factor", 1)
    given = {key: value for key, value in given.items() if value is not None}
    _check_keys(kind, partial, given)
    try:
        rope = _build(kind, theta, given, raw)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise StartupError(f"config.json: the rope parameters make no sense ({error})") from error
    _check_ranges(rope)
    return rope


def _check_keys(kind: Any, partial: Any, given: dict[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise StartupError(
            f"config.json: rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    unknown = sorted(set(given) - _KNOWN_KEYS[kind]) + ["partial_rotary_factor"] * (partial != 1)
    if unknown:
        raise StartupError(f"config.json: rope type {kind!r} with {unknown[0]} is not supported")
    missing = sorted(_REQUIRED_KEYS[kind] - set(given))
    if missing:
        raise StartupError(f"config.json: rope type {kind!r} needs {missing[0]}")


def _check_ranges(rope: RopeConfig) -> None:
    fine = (
        rope.theta > 1
        and rope.factor > 0
        and rope.original_tokens > 0
        and rope.low_freq_factor < rope.high_freq_factor
        and rope.beta_slow < rope.beta_fast
    )
    if not fine:
        raise StartupError("config.json: the rope parameters are out of range")


def _build(kind: str, theta: Any, given: dict[str, Any], raw: Mapping[str, Any]) -> RopeConfig:
    factor = float(given.get("factor", 1.0))
    original = raw.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", raw["max_position_embeddings"]
    )
    return RopeConfig(
        theta=10_000.0 if theta is None else float(theta),
        kind=kind,
        factor=factor,
        original_tokens=int(original),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(factor, given) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(factor: float, given: dict[str, Any]) -> float:
    """The temperature of YaRN (Peng et al., 2023, section 3.4), or the one the config states."""
    if "attention_factor" in given:
        return float(given["attention_factor"])
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
