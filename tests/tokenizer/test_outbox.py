"""Merging of deltas while a gateway is behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemesh.shared.wire import Delta, TokenLogprob, pack_ids
from pagemesh.tokenizer_svc.outbox import merge, size_bytes

ENTRY = TokenLogprob(5, "a", b"a", -1.0, 1, [(5, "a", b"a", -1.0, 1)])

deltas = st.builds(
    Delta,
    request_id=st.just("r"),
    choice=st.just(0),
    text=st.text(max_size=4),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(pack_ids),
    logprobs=st.none() | st.lists(st.just(ENTRY), max_size=3),
    prompt_logprobs=st.none() | st.just([None, ENTRY]),
    cached_tokens=st.integers(0, 9),
)


@given(first=deltas, second=deltas)
def test_a_merged_delta_holds_all_of_both(first: Delta, second: Delta) -> None:
    merged = merge(first, second)
    assert merged.text == first.text + second.text
    assert merged.token_ids == first.token_ids + second.token_ids
    assert (merged.logprobs or []) == (first.logprobs or []) + (second.logprobs or [])
    assert merged.prompt_logprobs == first.prompt_logprobs or second.prompt_logprobs


def test_the_end_of_a_choice_survives_merging() -> None:
    last = Delta("r", 0, "b", pack_ids([2]), finish_reason="stop", stop_reason="x")
    merged = merge(Delta("r", 0, "a", pack_ids([1])), last)
    assert (merged.text, merged.finish_reason, merged.stop_reason) == ("ab", "stop", "x")


@given(first=deltas, second=deltas)
def test_size_is_additive(first: Delta, second: Delta) -> None:
    if first.prompt_logprobs is None or second.prompt_logprobs is None:
        merged = merge(first, second)
        assert size_bytes(merged) == size_bytes(first) + size_bytes(second)
