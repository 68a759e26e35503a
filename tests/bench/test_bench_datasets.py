"""What is sent, and when: drawn from a seed alone."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.bench.arrivals import arrival_times_s
from pagemesh.bench.datasets import (
    BenchRequest,
    Endpoint,
    PrefixShape,
    RandomShape,
    as_messages,
    as_text,
    as_token_ids,
    file_requests,
    random_requests,
    shared_prefix_requests,
)
from pagemesh.shared.errors import StartupError


def drawn(n_requests: int, shape: RandomShape, seed: int = 0) -> list[BenchRequest]:
    return random_requests(n_requests, shape, vocab_tokens=50, seed=seed, wording=as_token_ids)


@given(
    input_len=st.integers(1, 60),
    output_len=st.integers(1, 60),
    ratio=st.floats(0, 0.99),
    seed=st.integers(0, 5),
)
def test_random_lengths_stay_in_their_range(
    input_len: int, output_len: int, ratio: float, seed: int
) -> None:
    for request in drawn(8, RandomShape(input_len, output_len, ratio), seed):
        assert isinstance(request.prompt, list)
        assert all(isinstance(i, int) and 0 <= i < 50 for i in request.prompt)
        for length, middle in ((len(request.prompt), input_len), (request.max_tokens, output_len)):
            assert max(math.floor(middle * (1 - ratio)), 1) <= length
            assert length <= math.ceil(middle * (1 + ratio))
        assert request.prompt_tokens == len(request.prompt)


def test_a_seed_draws_the_same_and_another_something_else() -> None:
    shape = RandomShape(20, 5, 0.5)
    assert drawn(4, shape) == drawn(4, shape)
    assert drawn(4, shape) != drawn(4, shape, seed=1)


def test_text_has_a_word_an_id_and_no_certain_length() -> None:
    shape = RandomShape(30, 5)
    (request,) = random_requests(1, shape, vocab_tokens=9_000, seed=0, wording=as_text)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 30
    assert request.prompt_tokens is None


def test_chat_carries_the_same_text() -> None:
    assert as_messages([1, 2]) == [{"role": "user", "content": as_text([1, 2])}]


def test_prefixes_are_shared_in_turn_and_ends_are_not() -> None:
    shape = PrefixShape(prefix_len=40, suffix_len=8, num_prefixes=2, output_len=3)
    requests = shared_prefix_requests(6, shape, vocab_tokens=10_000, seed=0, wording=as_token_ids)
    prompts: list[Any] = [request.prompt for request in requests]
    assert [prompt[:40] for prompt in prompts] == [prompts[0][:40], prompts[1][:40]] * 3
    assert prompts[0][:40] != prompts[1][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6
    assert {len(prompt) for prompt in prompts} == {48}
    assert {request.max_tokens for request in requests} == {3}


def from_file(
    folder: Path, *rows: object, endpoint: Endpoint = "completions"
) -> list[BenchRequest]:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return file_requests(path, 10, max_tokens=16, endpoint=endpoint)


def test_a_file_gives_text_ids_and_lengths(tmp_path: Path) -> None:
    rows = ({"prompt": "Hi", "max_tokens": 3}, "", {"prompt": [5, 6]})
    assert from_file(tmp_path, *rows) == [BenchRequest("Hi", 3), BenchRequest([5, 6], 16)]


def test_a_file_gives_conversations(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    rows = ({"messages": talk}, {"prompt": "Hi"})
    assert [request.prompt for request in from_file(tmp_path, *rows, endpoint="chat")] == [
        talk,
        [{"role": "user", "content": "Hi"}],
    ]


def test_a_file_is_read_up_to_the_number_of_prompts(tmp_path: Path) -> None:
    assert len(from_file(tmp_path, *[{"prompt": "Hi"}] * 12)) == 10


@pytest.mark.parametrize(
    ("row", "endpoint", "sentence"),
    [
        ("{", "completions", "line 2 is not JSON"),
        ({"messages": []}, "completions", r"line 2 has no prompt \(text or token ids\)"),
        ({"prompt": [1]}, "chat", "line 2 has no prompt or messages"),
        ({"prompt": []}, "completions", "line 2 has no prompt"),
        ([1], "completions", "line 2 has no prompt"),
        ({"prompt": "Hi", "max_tokens": 0}, "completions", "line 2: max_tokens must be"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, row: object, endpoint: Endpoint, sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        from_file(tmp_path, {"prompt": "Hi"}, row, endpoint=endpoint)


def test_a_missing_or_empty_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        file_requests(tmp_path / "no", 1, max_tokens=1, endpoint="chat")
    with pytest.raises(StartupError, match="holds no requests"):
        from_file(tmp_path, "")


@given(n=st.integers(0, 50), rate=st.floats(0.1, 1e4), seed=st.integers(0, 9))
def test_arrivals_ascend_from_zero(n: int, rate: float, seed: int) -> None:
    times = arrival_times_s(n, rate, seed)
    assert len(times) == n
    assert times[:1] == [0.0][:n]
    assert all(earlier <= later for earlier, later in pairwise(times))


def test_arrivals_are_poisson() -> None:
    """Exponential gaps: the mean is 1/rate, and as large as the standard deviation."""
    gaps = [later - earlier for earlier, later in pairwise(arrival_times_s(20_001, 4.0, 0))]
    mean = fmean(gaps)
    deviation = fmean((gap - mean) ** 2 for gap in gaps) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times_s(3, math.inf, 0) == [0.0, 0.0, 0.0]
