"""The sampler on a device against the one on the host: the same requests, the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagemesh.kernels import sample_rows as reference
from pagemesh.kernels.gpu.row_params import ROW_WORDS, SamplingRows
from pagemesh.kernels.gpu.sampling import SampledTokens
from pagemesh.kernels.logprobs import token_logprobs
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.gpu.sampler import GPUSampled, GPUSampler, HostRows
from pagemesh.worker_svc.gpu.sampling_state import GPUSamplingState, row_words
from pagemesh.worker_svc.sampling_state import PENALISED, SamplingState

VOCAB, SLOTS, ROW_TOKENS = 400, 9, 64
N_PROMPT = 6
PLAIN = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)]
FILTERED = [SamplingParams(top_k=20), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
EDITED = [
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.4),
    SamplingParams(temperature=0.0, logit_bias={3: 100.0, 4: -100.0, VOCAB + 5: 9.0}),
    SamplingParams(min_tokens=2, stop_token_ids=[5], logit_bias={5: 100.0, 8: 90.0}, top_k=2),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=99, min_tokens=50, top_p=0.9),
]
LOGPROBS = [
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(logprobs=5, repetition_penalty=1.5, top_p=0.8),
]


class Pair:
    """The same requests in both states."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        sizes: dict[str, Any] = {
            "max_num_seqs": SLOTS,
            "vocab_tokens": VOCAB,
            "eos_token_ids": [2, 999],
        }
        self.host = SamplingState(**sizes, device=torch.device("cpu"))
        self.state = GPUSamplingState(**sizes, device=self.device)
        self.sampler = GPUSampler(self.state)
        self.params = torch.zeros((SLOTS, ROW_WORDS), dtype=torch.int32, device=device)
        self.known = np.zeros((SLOTS, ROW_TOKENS), np.int32)
        self.token_ids = torch.zeros((SLOTS, ROW_TOKENS), dtype=torch.int32, device=device)
        self.lengths = np.zeros(SLOTS, np.int64)

    def enter(self, slot: int, params: SamplingParams) -> None:
        known = np.random.default_rng(slot).integers(0, 12, N_PROMPT + 3).astype(np.int32)
        self.lengths[slot] = len(known)
        self.known[slot, : len(known)] = known
        self.host.enter(slot, params, slot * 77, torch.from_numpy(known), N_PROMPT)
        words = self.state.enter(slot, params, slot * 77, known, N_PROMPT)
        self.params[slot] = torch.from_numpy(words).to(self.device)

    def leave(self, slots: list[int]) -> None:
        for state in (self.host, self.state):
            state.leave(np.array(slots))

    def step(self, logits: torch.Tensor, slots: list[int]) -> GPUSampled:
        """Samples with both, one padding row at the end of the batch, and compares the tokens."""
        at = np.array(slots)
        positions, n_output = self.lengths[at], self.lengths[at] - N_PROMPT
        wide = logits.to("cpu", torch.float32, copy=True)
        expected, finite = reference.sample_rows(wide, self.host.inputs(at, positions, n_output))
        rows = SamplingRows(
            self.params,
            torch.tensor([*slots, -1], dtype=torch.int32, device=self.device),
            torch.tensor([*positions, 0], device=self.device),
        )
        padded = torch.cat((logits, logits[:1] * torch.nan))
        result = torch.full((2, SLOTS), -7, dtype=torch.int32, device=self.device)
        out = SampledTokens(result, self.token_ids)
        sampled = self.sampler(padded, HostRows(at, n_output), rows, out)
        self.sampler.count(sampled)
        untouched = [-7] * (SLOTS - len(slots))
        assert sampled.result[0].tolist() == expected.tolist() + untouched
        assert sampled.result[1].tolist() == finite.tolist() + untouched
        self._commit(at, expected)
        return sampled

    def _commit(self, slots: np.ndarray, tokens: torch.Tensor) -> None:
        self.known[slots, self.lengths[slots]] = tokens
        written = self.token_ids.cpu().numpy()[slots, self.lengths[slots]]
        assert written.tolist() == tokens.tolist()
        self.lengths[slots] += 1
        penalised = np.flatnonzero(self.host.needs[slots] & PENALISED)
        self.host.counts.add(slots[penalised], tokens[torch.from_numpy(penalised)])
        mine, theirs = self.state.counts, self.host.counts
        rows = [(mine._used[slot], theirs._used[slot]) for slot in theirs._used]
        assert len(mine._used) == len(rows)
        for my_row, their_row in rows:
            assert torch.equal(mine.seen[my_row].cpu(), theirs.seen[their_row])
            assert torch.equal(mine.output_counts[my_row].cpu(), theirs.output_counts[their_row])


def random_logits(n_rows: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randn(n_rows, VOCAB) * 3).to(device, dtype)


@pytest.mark.parametrize(
    "requests", [PLAIN, FILTERED, EDITED, LOGPROBS, [*PLAIN, *FILTERED, EDITED[0], *LOGPROBS]],
    ids=["plain", "filtered", "edited", "logprobs", "mixed"],
)  # fmt: skip
def test_tokens_and_counts_are_those_of_the_host(
    device: str, dtype: torch.dtype, requests: list[SamplingParams]
) -> None:
    pair = Pair(device)
    slots = list(range(len(requests)))[::-1]
    for slot, params in enumerate(requests):
        pair.enter(slot, params)
    for step in range(2):
        pair.step(random_logits(len(slots), device, dtype, step), slots)


def test_logprobs_are_of_the_raw_logits(device: str, dtype: torch.dtype) -> None:
    pair = Pair(device)
    for slot, params in enumerate([*PLAIN, *LOGPROBS]):
        pair.enter(slot, params)
    pair.enter(4, SamplingParams(logprobs=1, logprob_token_ids=[3, VOCAB - 1], top_k=9))
    logits = random_logits(5, device, dtype)
    sampled = pair.step(logits, [2, 0, 3, 1, 4])
    assert sampled.asked.rows.tolist() == [0, 2, 4]
    assert sampled.asked.tops.tolist() == [0, 5, 1]
    assert sampled.asked.more.tolist() == [0, 0, 2]
    chosen = sampled.result[0][[0, 2, 4]].cpu().to(torch.int64)
    raw = logits.float().cpu()
    expected, _ = token_logprobs(raw, torch.tensor([0, 2, 4]), chosen, 5)
    assert sampled.logprobs is not None
    values = sampled.logprobs.values.cpu()
    torch.testing.assert_close(values[:, :6], expected.values)
    torch.testing.assert_close(values[2, 6:], raw[4].log_softmax(0)[[3, VOCAB - 1]])
    assert sampled.logprobs.ids[2, 6:].tolist() == [3, VOCAB - 1]
    assert torch.equal(sampled.logprobs.ranks.cpu(), expected.ranks)


def test_bans_end_with_the_tokens_that_were_asked_for(device: str, dtype: torch.dtype) -> None:
    pair = Pair(device)
    pair.enter(0, SamplingParams(temperature=0.0, min_tokens=4, logit_bias={2: 100.0}))
    tokens = [pair.step(random_logits(1, device, dtype), [0]).result[0, 0].item() for _ in range(2)]
    assert tokens[0] != 2
    assert tokens[1] == 2


def test_a_row_that_is_not_finite_beside_edited_ones(device: str) -> None:
    """Its token is 0 here, whatever the host draws from zeros."""
    pair = Pair(device)
    for slot in range(3):
        pair.enter(slot, SamplingParams(temperature=0.0, repetition_penalty=1.1))
    logits = random_logits(3, device, torch.float32)
    logits[1, 30] = -torch.inf
    logits[1, 0] = 90.0
    rows = SamplingRows(
        pair.params,
        torch.arange(3, dtype=torch.int32, device=device),
        torch.tensor([9, 9, 9], device=device),
    )
    out = SampledTokens(torch.zeros((2, 3), dtype=torch.int32, device=device), pair.token_ids)
    sampled = pair.sampler(logits, HostRows(np.arange(3), np.full(3, 3)), rows, out)
    assert sampled.result[1, :3].tolist() == [1, 0, 1]
    assert sampled.result[0][1].item() == 0


def test_a_slot_that_was_left_is_used_again(device: str, dtype: torch.dtype) -> None:
    pair = Pair(device)
    for params in (EDITED[0], PLAIN[1], EDITED[2], EDITED[3]):
        pair.enter(1, params)
        pair.step(random_logits(1, device, dtype), [1])
        pair.leave([1])


def test_prompt_scores(device: str, dtype: torch.dtype) -> None:
    pair = Pair(device)
    logits = random_logits(5, device, dtype)
    targets = torch.tensor([1, 2, 3, 4, 399], device=device)
    scores, finite = pair.sampler.score(logits, targets, 3)
    expected, _ = token_logprobs(logits.float().cpu(), torch.arange(5), targets.cpu(), 3)
    torch.testing.assert_close(scores.values.cpu(), expected.values)
    assert finite.item()
    logits[2, 2] = torch.nan
    _, finite = pair.sampler.score(logits, targets, 3)
    assert not finite.item()


def test_the_words_of_a_row() -> None:
    words = row_words(SamplingParams(temperature=0.5, top_k=-1, top_p=0.25, min_p=1.0), -2, 6)
    floats = words.view(np.float32)
    assert words[:4].tolist() == [-2, -1, 0, 6]
    assert floats[4:7].tolist() == [2.0, 0.25, 0.0]
    assert floats[7:10].tolist() == [1.0, 0.0, 0.0]
    assert len(words) == ROW_WORDS
