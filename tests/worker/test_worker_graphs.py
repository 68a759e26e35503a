"""Which steps share a graph."""

from __future__ import annotations

import pytest

from pagemesh.worker_svc.gpu.graphs import decode_sizes, prompt_sizes


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 257, 320, 1024])
def test_every_batch_has_a_graph(max_rows: int) -> None:
    sizes = decode_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(size <= max_rows for size in sizes)


def test_sizes_beyond_the_measured_ones() -> None:
    assert decode_sizes(500)[-5:] == [256, 320, 384, 448, 500]


@pytest.mark.parametrize(
    ("max_tokens", "last"), [(8, []), (16, [16]), (500, [256, 384]), (8192, [896, 1024])]
)
def test_prompts_have_graphs_of_what_a_step_may_hold(max_tokens: int, last: list[int]) -> None:
    sizes = prompt_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-2:] == last
