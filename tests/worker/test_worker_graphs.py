"""Which batches share a decode graph."""

from __future__ import annotations

import pytest

from pagemesh.worker_svc.gpu.graphs import graph_sizes


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 257, 320, 1024])
def test_every_batch_has_a_graph(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(size <= max_rows for size in sizes)


def test_sizes_beyond_the_measured_ones() -> None:
    assert graph_sizes(500)[-5:] == [256, 320, 384, 448, 500]
