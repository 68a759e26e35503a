"""Every family's logits equal transformers' in float32, however the tokens are cut into steps.

Of both implementations: the reference in torch and the program of the CPU's kernels.
"""

from __future__ import annotations

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import MODELS, VOCAB, load, make_model

from pagemesh.kernels.cpu.team import Team
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder

LENGTHS = {"a": 41, "b": 17, "c": 4, "d": 29}
CHUNKS = [7, 1, 12, 3, 1, 1, 5, 11]


@pytest.fixture(scope="module", params=sorted(MODELS))
def family_folder(request, tmp_path_factory):
    """(transformers' model, the folder it is saved in)."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=["reference", "cpu-kernels"])
def family(request, family_folder):
    """(our decoder, token ids by name, transformers' logits [n, vocab] by name)."""
    model, folder = family_folder
    decoder = load(folder)
    if request.param == "cpu-kernels":
        decoder = CPUDecoder(decoder, Team(2), dtype=torch.float32)
    rng = torch.Generator().manual_seed(1)
    ids = {name: torch.randint(VOCAB, (n,), generator=rng) for name, n in LENGTHS.items()}
    expected = {name: model(tokens[None]).logits[0] for name, tokens in ids.items()}
    return decoder, {name: tokens.tolist() for name, tokens in ids.items()}, expected


def assert_equal(got, expected):
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_whole_prefill(family):
    decoder, ids, expected = family
    assert_equal(PagedDriver(decoder).step({"a": ids["a"]})["a"], expected["a"])


def test_all_sequences_in_one_batch(family):
    decoder, ids, expected = family
    got = PagedDriver(decoder).step(ids)
    for name in ids:
        assert_equal(got[name], expected[name])


def test_decode_token_by_token(family):
    decoder, ids, expected = family
    driver = PagedDriver(decoder)
    for name in ids:
        driver.step({name: ids[name][:3]})
    for position in range(3, max(LENGTHS.values())):
        running = [name for name in ids if position < LENGTHS[name]]
        got = driver.step({name: [ids[name][position]] for name in running})
        for name in running:
            assert_equal(got[name][0], expected[name][position])


def test_chunks_of_odd_sizes_beside_decodes(family):
    """Each sequence starts elsewhere in the list of chunk sizes, so steps mix both kinds of row."""
    decoder, ids, expected = family
    driver = PagedDriver(decoder, block_tokens=8)
    done = dict.fromkeys(ids, 0)
    for step in range(2 * max(LENGTHS.values())):
        work = {}
        for offset, name in enumerate(ids):
            size = CHUNKS[(step + offset) % len(CHUNKS)]
            work[name] = ids[name][done[name] : done[name] + size]
        work = {name: tokens for name, tokens in work.items() if tokens}
        if not work:
            break
        for name, logits in driver.step(work).items():
            start = done[name]
            done[name] += len(work[name])
            assert_equal(logits, expected[name][start : done[name]])
    assert done == LENGTHS


def test_copied_blocks_continue_like_their_source(family):
    """A fork of a sequence (n > 1) owns copies of its blocks."""
    decoder, ids, expected = family
    driver = PagedDriver(decoder)
    driver.step({"a": ids["a"][:30]})
    source, fork = driver.fork("a", "fork")
    driver.kv.copy_blocks(torch.tensor(source), torch.tensor(fork))
    driver.step({"a": [1, 2, 3, 4, 5]})
    assert_equal(driver.step({"fork": ids["a"][30:]})["fork"], expected["a"][30:])
