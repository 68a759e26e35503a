"""What the endpoints work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from pagemesh.gateway.cancelling import Cancellations
from pagemesh.gateway.directory import ModelDirectory
from pagemesh.gateway.keepalive import KeepAlive
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.offload import Offload
from pagemesh.gateway.open_requests import OpenRequests
from pagemesh.gateway.openai.body import BodyDecoder, BodyReader
from pagemesh.gateway.openai.live import Turn
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.pause_store import PauseStore
from pagemesh.gateway.route_store import RouteStore
from pagemesh.gateway.routing import Router
from pagemesh.gateway.upstream import Upstream

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Backend:
    directory: ModelDirectory
    router: Router
    route_store: RouteStore
    upstream: Upstream
    metrics: GatewayMetrics
    keep_alive: KeepAlive
    turn: Turn
    seeds: Seeds
    offload: Offload
    pause: PauseStore
    open_requests: OpenRequests
    cancellations: Cancellations
    trusts_chat_templates: bool = False
    """Whether those of requests are rendered."""

    def body_reader(
        self, endpoint: str, kind: type[T], refused: Mapping[str, tuple[Any, ...]]
    ) -> BodyReader[T]:
        """Of the bodies of `endpoint`, for which unknown fields are counted."""
        on_unknown = partial(self.metrics.unknown_field, endpoint)
        return BodyReader(BodyDecoder(kind, refused), self.offload, on_unknown)
