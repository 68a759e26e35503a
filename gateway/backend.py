"""What the endpoints work with."""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.gateway.cancelling import Cancellations
from pagemesh.gateway.directory import ModelDirectory
from pagemesh.gateway.keepalive import KeepAlive
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.offload import Offload
from pagemesh.gateway.open_requests import OpenRequests
from pagemesh.gateway.openai.live import Turn
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.pause_store import PauseStore
from pagemesh.gateway.route_store import RouteStore
from pagemesh.gateway.routing import Router
from pagemesh.gateway.upstream import Upstream


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
