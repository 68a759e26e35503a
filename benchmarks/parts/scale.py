"""The mesh in several shapes under loads that keep all its processes busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from parts.client import Counts, Load
from parts.count import count
from parts.mesh import SERVICES, Mesh, running_mesh

_US: Final = 1e6
_PARTS: Final = (*SERVICES, "client")
_WARM_UP_S: Final = 1.0
_COLUMNS: Final = ("gateways", "tokenizers", "tokens", "tokens/s", "requests/s", "events/token")


class Shape(NamedTuple):
    gateways: int
    tokenizers: int


class Demand(NamedTuple):
    """`streams` requests at a time, by `clients` processes in equal parts, for `seconds` each of
    the lengths `tokens`. The worker makes `rate` tokens a second; 0: as fast as it can."""

    streams: int
    clients: int
    seconds: float
    tokens: Sequence[int]
    rate: int


class Row(msgspec.Struct):
    """One length of answers in one shape. CPU time of the processes of each service, and of the
    clients, as shares of a core."""

    shape: Shape
    tokens: int
    tokens_per_s: float
    requests_per_s: float
    events_per_token: float
    shares: dict[str, list[float]]

    def us_per_token(self, part: str) -> float:
        """CPU microseconds, of all processes of a service together."""
        return sum(self.shares[part]) / self.tokens_per_s * _US


async def rows(shapes: Iterable[Shape], demand: Demand) -> AsyncIterator[Row]:
    step_s = demand.streams / demand.rate if demand.rate else 0.0
    for shape in shapes:
        async with running_mesh(step_s, demand.streams, **shape._asdict()) as mesh:
            await _asked(mesh, demand, demand.tokens[0], _WARM_UP_S)
            for tokens in demand.tokens:
                yield await _row(mesh, shape, demand, tokens)


async def _row(mesh: Mesh, shape: Shape, demand: Demand, tokens: int) -> Row:
    before_s = mesh.cpu_s_of_each()
    counts = await _asked(mesh, demand, tokens, demand.seconds)
    after_s = mesh.cpu_s_of_each()
    seconds = max(each.last_s for each in counts) - min(each.first_s for each in counts)
    requests = sum(each.requests for each in counts)
    shares = {
        service: [
            (after - before) / seconds
            for before, after in zip(before_s[service], after_s[service], strict=True)
        ]
        for service in SERVICES
    }
    return Row(
        shape,
        tokens,
        tokens_per_s=requests * tokens / seconds,
        requests_per_s=requests / seconds,
        events_per_token=sum(each.events for each in counts) / (requests * tokens),
        shares={**shares, "client": [each.cpu_s / seconds for each in counts]},
    )


async def _asked(mesh: Mesh, demand: Demand, tokens: int, seconds: float) -> list[Counts]:
    streams = demand.streams // demand.clients
    load = Load(url=mesh.url, streams=streams, tokens=tokens, seconds=seconds)
    return await asyncio.gather(*(count(load) for _ in range(demand.clients)))


def head_lines() -> Iterator[str]:
    yield "of each service: CPU µs a token, and the share of a core of its busiest process"
    yield "".join(f"{name:>13}" for name in (*_COLUMNS, *_PARTS, "together"))


def row_line(row: Row) -> str:
    figures = (
        *(f"{number}" for number in (*row.shape, row.tokens)),
        f"{row.tokens_per_s:.0f}",
        f"{row.requests_per_s:.0f}",
        f"{row.events_per_token:.3f}",
        *(f"{row.us_per_token(part):.2f} {max(row.shares[part]):4.0%}" for part in _PARTS),
        f"{sum(map(row.us_per_token, _PARTS)):.2f}",
    )
    return "".join(f"{figure:>13}" for figure in figures)
