"""The real SmolLM2: its dequantised GGUF gives transformers' logits."""

from __future__ import annotations

import copy

import pytest
import torch
from paged_driver import PagedDriver
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagemesh.kernels.cpu.team import Team
from pagemesh.shared.prepared import load_prepared
from pagemesh.worker_svc.loader import load_decoder
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder
from pagemesh.worker_svc.models.decoder import Decoder

# transformers takes its time to read a GGUF.
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def decoder(smollm2_folder):
    prepared = load_prepared(smollm2_folder)
    return load_decoder(smollm2_folder, prepared, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def cpu_decoder(decoder):
    return CPUDecoder(copy.deepcopy(decoder), Team(2), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(smollm2_folder):
    """What transformers makes of the same file (from_pretrained would want `accelerate`)."""
    file = smollm2_folder / load_prepared(smollm2_folder).weights[0]
    config = AutoConfig.from_pretrained(smollm2_folder)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.mark.parametrize("model", ["decoder", "cpu_decoder"])
def test_logits_equal_transformers(request, model, reference):
    decoder = request.getfixturevalue(model)
    ids = torch.randint(
        decoder.config.vocab_size, (90,), generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        driver = PagedDriver(decoder, block_tokens=16)
        parts = [
            driver.step({"a": ids[a:b].tolist()})["a"] for a, b in ((0, 50), (50, 51), (51, 90))
        ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-3, rtol=1e-3)


def test_bfloat16_stays_close(decoder):
    """The same top choice nearly everywhere: a wrong cast somewhere would break most of them."""
    narrow = Decoder(decoder.config, dtype=torch.bfloat16, device="cpu")
    narrow.load_state_dict(decoder.state_dict())
    ids = torch.randint(
        decoder.config.vocab_size, (64,), generator=torch.Generator().manual_seed(0)
    )
    wide = PagedDriver(decoder).step({"a": ids.tolist()})["a"]
    got = PagedDriver(narrow, dtype=torch.bfloat16).step({"a": ids.tolist()})["a"]
    assert (wide.argmax(-1) == got.argmax(-1)).float().mean() > 0.8
    assert (wide - got).abs().mean() < 0.3


def test_bits_in_bfloat16_are_the_same_however_the_tokens_are_cut(decoder):
    """Hidden states alone and token by token, beside others in chunks, on more threads."""
    narrow = Decoder(decoder.config, dtype=torch.bfloat16, device="cpu")
    narrow.load_state_dict(decoder.state_dict())
    rng = torch.Generator().manual_seed(0)
    ids, others = (torch.randint(1000, (n,), generator=rng).tolist() for n in (70, 150))
    results = []
    for threads, block_tokens, sizes in (1, 16, [1] * 70), (2, 16, [70]), (3, 5, [9, 1, 60]):
        model = CPUDecoder(copy.deepcopy(narrow), Team(threads), dtype=torch.bfloat16)
        driver = PagedDriver(model, block_tokens=block_tokens, dtype=torch.bfloat16)
        parts, at = [], 0
        for i, size in enumerate(sizes):
            work = {"a": ids[at : at + size]}
            if threads > 1:
                work |= {"b": others[50 * i : 50 * (i + 1)]}
            parts.append(driver.hidden(work)["a"])
            at += size
        results.append(torch.cat(parts))
    for result in results[1:]:
        assert torch.equal(result, results[0])
