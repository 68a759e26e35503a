"""The exceptions of the mesh. Each carries the fields its handler needs."""

from __future__ import annotations

from typing import Final

from pagemesh.shared.messages import WireError

# Code of a refusal by a service that drains: the request may go to another one at once.
SHUTTING_DOWN: Final = "shutting_down"


class PagemeshError(Exception):
    """Root of every exception raised on purpose by pagemesh."""


class RequestError(PagemeshError):
    """One request cannot be served; nothing else is touched.

    `status` is the HTTP status the gateway answers with, `code` OpenAI's machine-readable code,
    `param` the request field at fault, and `retry_after_s` when to come back, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> WireError:
        return WireError(self.status, self.code, self.param, self.message, self.retry_after_s)

    @classmethod
    def from_wire(cls, error: WireError) -> RequestError:
        return cls(
            error.message,
            status=error.status,
            code=error.code,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )


class StartupError(PagemeshError):
    """A service cannot start. The message says what is wrong and what to do; exit code 2."""


class SettingsError(StartupError):
    """A setting is unknown or has a value that cannot work. `key` is its name in the schema."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class Stalled(PagemeshError):
    """Something in this process stands still and will not go on: the process must end, for a new
    one to begin anew."""


class LinkClosed(PagemeshError):
    """The link to a peer is gone. `peer` is its instance id, `reason` the cause."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"link to {peer} closed: {reason}")
        self.peer = peer
        self.reason = reason


class HandshakeRefused(PagemeshError):
    """One side does not accept the other: another protocol version, mesh secret or idea of TLS."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address} refused the handshake: {reason}")
        self.address = address
        self.reason = reason
