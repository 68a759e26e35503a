"""Exceptions of the scheduler."""

from __future__ import annotations

from pagemesh.shared.errors import PagemeshError


class InvariantError(PagemeshError):
    """The engine's own books disagree, or the worker broke the step contract.

    Fatal to the requests of that one engine, never to the process.
    """
