"""The decoder of the CPU's kernels: the model it was made from, and the same bits always."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver
from tiny_models import VOCAB, load, make_model
from torch import Tensor

from pagemesh.kernels.cpu.team import Team
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder
from pagemesh.worker_svc.models.decoder import Decoder
from pagemesh.worker_svc.models.packing import quantize_rows

KEPT_AS = {  # with the type of the model and of its KV pool
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.int8: torch.bfloat16,
}
FAMILIES = ["llama-odd-sizes", "llama-tied", "qwen3-tied-biases-window"]
IDS = {
    name: torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for name, n in {"a": 41, "b": 90, "c": 4, "d": 63}.items()
}
TEAMS = {n: Team(n) for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A decoder of a family with weights of a dtype, the caller's own."""

    @cache
    def once(family: str, dtype: torch.dtype) -> Decoder:
        folder = tmp_path_factory.mktemp(family)
        make_model(family).save_pretrained(folder)
        return load(folder, dtype=dtype)

    return lambda family, dtype: copy.deepcopy(once(family, dtype))


@pytest.fixture(scope="module")
def cpu_decoder(loaded):
    """By family, what the matrices are kept as, and threads."""

    @cache
    def make(family: str, kept_as: torch.dtype, n_threads: int) -> CPUDecoder:
        decoder = loaded(family, KEPT_AS[kept_as])
        return CPUDecoder(decoder, TEAMS[n_threads], dtype=kept_as)

    return make


def in_float32(decoder: Decoder, kept_as: torch.dtype) -> Decoder:
    """The reference with exactly the weights that are kept."""
    wide = Decoder(decoder.config, dtype=torch.float32, device="cpu")
    wide.load_state_dict(decoder.state_dict())
    for weight in wide.parameters():
        if kept_as is torch.int8 and weight.dim() == 2:
            weight.data = dequantized(weight)
    return wide


def dequantized(weight: Tensor) -> Tensor:
    values, scale = quantize_rows(weight)
    return values.float() * scale[:, None]


@pytest.mark.parametrize("kept_as", KEPT_AS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference_with_the_kept_weights(loaded, cpu_decoder, family, kept_as):
    """What is left is the rounding of K and V as they are stored."""
    reference = in_float32(loaded(family, KEPT_AS[kept_as]), kept_as)
    decoder = cpu_decoder(family, kept_as, 2)
    driver = PagedDriver(decoder, dtype=KEPT_AS[kept_as], num_blocks=80)
    got, expected = driver.step(IDS), PagedDriver(reference, num_blocks=80).step(IDS)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2}.get(kept_as, 5e-2)
    for name in IDS:
        scale = expected[name].std()
        assert (got[name] - expected[name]).abs().mean() < tolerance * scale


def test_the_decoder_it_is_made_from_is_emptied(loaded):
    decoder = loaded("llama-tied", torch.float32)
    sizes = [weight.nbytes for weight in decoder.parameters() if weight.dim() == 2]
    made = CPUDecoder(decoder, TEAMS[1], dtype=torch.float32)
    assert all(weight.numel() == 0 for weight in decoder.parameters() if weight.dim() == 2)
    assert made.weights_bytes >= sum(sizes)


# -- bits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_by_token(cpu_decoder):
    """The final hidden states [n, H] of each sequence, computed alone, a token a step."""

    @cache
    def compute(family: str, kept_as: torch.dtype) -> dict[str, Tensor]:
        driver = PagedDriver(cpu_decoder(family, kept_as, 1), dtype=KEPT_AS[kept_as], num_blocks=80)
        return {
            name: torch.cat([driver.hidden({name: [token]})[name] for token in ids])
            for name, ids in IDS.items()
        }

    return compute


@settings(max_examples=25)
@given(st.data())
@pytest.mark.parametrize("kept_as", KEPT_AS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_token_are_always_the_same(cpu_decoder, token_by_token, family, kept_as, data):
    """In any batch, in any chunks, with any size of block, on any number of threads."""
    driver = PagedDriver(
        cpu_decoder(family, kept_as, data.draw(st.sampled_from(sorted(TEAMS)), "threads")),
        dtype=KEPT_AS[kept_as],
        block_tokens=data.draw(st.sampled_from([1, 5, 16, 24, 128]), "block_tokens"),
        num_blocks=220,
    )
    expected = token_by_token(family, kept_as)
    done = dict.fromkeys(IDS, 0)
    while left := {name: n for name in IDS if (n := len(IDS[name]) - done[name])}:
        sizes = st.fixed_dictionaries(
            {name: st.one_of(st.integers(1, n), st.just(n)) for name, n in left.items()}
        )
        chunks = data.draw(sizes)
        chosen = data.draw(st.sets(st.sampled_from(sorted(left)), min_size=1))
        work = {name: IDS[name][done[name] : done[name] + chunks[name]] for name in sorted(chosen)}
        for name, hidden in driver.hidden(work).items():
            start = done[name]
            done[name] += len(work[name])
            assert torch.equal(hidden, expected[name][start : done[name]])


def test_bits_of_logits_do_not_depend_on_their_batch(cpu_decoder):
    decoder = cpu_decoder("llama-odd-sizes", torch.bfloat16, 3)
    hidden = torch.randn(70, decoder.config.hidden_size)
    together = decoder.logits(hidden).clone()
    for n in (1, 2, 5, 12, 13, 49):
        rows = torch.randperm(70)[:n]
        assert torch.equal(decoder.logits(hidden[rows]), together[rows])


def test_pages_full_of_nan_change_nothing(cpu_decoder, token_by_token):
    """What earlier sequences left in the pool is never used, not even multiplied by zero."""
    driver = PagedDriver(
        cpu_decoder("llama-tied", torch.bfloat16, 2), dtype=torch.bfloat16, num_blocks=80
    )
    driver.kv.pool[:, :, 1:] = torch.nan
    got = driver.hidden(IDS)
    for name, expected in token_by_token("llama-tied", torch.bfloat16).items():
        assert torch.equal(got[name], expected)


def test_a_sequence_of_nan_leaves_the_others_alone(loaded, token_by_token):
    decoder = loaded("llama-tied", torch.bfloat16)
    unused = next(token for token in range(VOCAB) if token not in IDS["a"] + IDS["b"])
    decoder.embedding.data[unused] = torch.nan
    driver = PagedDriver(
        CPUDecoder(decoder, TEAMS[2], dtype=torch.bfloat16), dtype=torch.bfloat16, num_blocks=80
    )
    got = driver.hidden({"a": IDS["a"], "bad": [unused] * 7, "b": IDS["b"]})
    assert got["bad"].isnan().all()
    for name in ("a", "b"):
        assert torch.equal(got[name], token_by_token("llama-tied", torch.bfloat16)[name])


def test_rows_may_be_many_more_than_before(cpu_decoder, token_by_token):
    """Buffers grow with a step, and what was computed before keeps its bits."""
    small = cpu_decoder("llama-tied", torch.float32, 2)
    driver = PagedDriver(small, num_blocks=800)
    many = {f"{name}{i}": ids for name, ids in IDS.items() for i in range(12)}
    got = driver.hidden(many)
    for name, hidden in got.items():
        assert torch.equal(hidden, token_by_token("llama-tied", torch.float32)[name[0]])


def test_buffers_that_cannot_grow_stay_as_they_were(loaded, token_by_token, monkeypatch):
    """The step fails; smaller ones, such as its halves, go on."""
    decoder = CPUDecoder(loaded("llama-tied", torch.float32), TEAMS[2], dtype=torch.float32)

    def nothing_left(elements: int, dtype: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("pagemesh.worker_svc.models.cpu_decoder.zeros", nothing_left)
        with pytest.raises(MemoryError):
            PagedDriver(decoder).hidden({"b": IDS["b"]})
        small = PagedDriver(decoder).hidden({"a": IDS["a"]})
    assert torch.equal(small["a"], token_by_token("llama-tied", torch.float32)["a"])
    grown = PagedDriver(decoder).hidden({"b": IDS["b"]})
    assert torch.equal(grown["b"], token_by_token("llama-tied", torch.float32)["b"])
