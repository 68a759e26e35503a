"""A callback that holds the event loop shows."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from pagemesh.shared.loop_lag import LoopLag

NAME = "pagemesh_event_loop_lag_seconds"


async def test_what_holds_the_loop_is_seen_by_those_who_wait() -> None:
    metrics = CollectorRegistry()
    watching = asyncio.create_task(LoopLag(metrics).run())
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 -- that is the point
    await asyncio.sleep(0.05)
    watching.cancel()
    seen = metrics.get_sample_value(f"{NAME}_bucket", {"le": "+Inf"})
    quick = metrics.get_sample_value(f"{NAME}_bucket", {"le": "0.2"})
    assert seen is not None
    assert quick is not None
    assert seen - quick >= 1
