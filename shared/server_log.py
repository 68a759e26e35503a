"""What aiohttp's server logs to."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """A peer that speaks no HTTP, or leaves too early, is nobody's fault here: no error, no
    traceback. Anybody could fill a log with them."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))

    def exception(self, msg: object, *args: object, exc_info: Any = True, **fields: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self.debug("malformed request: %s", exc_info.message.strip())
        elif isinstance(exc_info, ConnectionError):
            self.debug("the client has left: %s", exc_info)
        else:
            super().exception(msg, *args, exc_info=exc_info, **fields)
