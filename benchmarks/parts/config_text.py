"""Configurations of kernels as they stand in code."""

from __future__ import annotations

from dataclasses import fields, is_dataclass


def show(value: object) -> str:
    """As Python, a configuration without what is at its default."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    pairs = ((each, getattr(value, each.name)) for each in fields(value))
    given = ", ".join(f"{each.name}={it!r}" for each, it in pairs if it != each.default)
    return f"{type(value).__name__}({given})"
