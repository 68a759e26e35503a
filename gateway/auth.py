"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from pagemesh.shared.errors import RequestError

OPEN_PATHS: Final = frozenset({"/health", "/ready"})


class ApiKeys:
    """The keys clients may send. Only digests are kept, compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.strip()) for key in keys]

    def check(self, path: str, authorization: str | None) -> None:
        """Raises RequestError (401). Without keys, and for health checks, everybody passes."""
        if not self._digests or path.rstrip("/") in OPEN_PATHS:
            return
        scheme, _, key = (authorization or "").strip().partition(" ")
        if not key.strip() or scheme.lower() != "bearer":
            raise _refused("Send an API key: 'Authorization: Bearer KEY'.")
        digest = _digest(key.strip())
        # Every key is compared, whichever matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if True not in matches:
            raise _refused("The API key is not valid.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _refused(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")
