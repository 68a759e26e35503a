"""The division of a GPU: by numbers, and by every number for its sentences."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.worker_svc.gpu.memory import (
    RESERVE_BYTES,
    Card,
    Division,
    Needs,
    Wanted,
    division_figures,
    division_table,
    lowered,
    lowered_to_fit,
)
from pagemesh.worker_svc.gpu.memory_advice import (
    check_weights,
    divide,
    ran_out,
    remedies,
    step_too_large,
)
from pagemesh.worker_svc.gpu.tenants import Tenant, parse_tenants
from pagemesh.worker_svc.memory import parse_bytes

GIB, MIB = 2**30, 2**20
CARD = Card(name="NVIDIA H200", total_bytes=140 * GIB, others_bytes=GIB)
NEEDS = Needs(
    weights_bytes=15 * GIB,
    slots_bytes=256 * MIB,
    step_bytes=GIB,
    step_bytes_per_token=100_000.0,
    graphs_bytes=GIB // 2,
)
# 8B: 32 layers, 8 KV heads of 128, 16 bits.
WANTED = Wanted(
    share=0.9,
    kv_bytes=None,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    block_tokens=16,
    model_max_tokens=40960,
    max_model_len="auto",
    max_num_seqs=256,
    step_tokens=8192,
)


def divided(card: Card = CARD, needs: Needs = NEEDS, **changes: object) -> Division:
    return divide("llama", card, needs, replace(WANTED, **changes))


def sentence(card: Card = CARD, needs: Needs = NEEDS, **changes: object) -> str:
    with pytest.raises(StartupError) as error:
        divided(card, needs, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_pool_gets_what_is_left_of_the_share() -> None:
    plan = divided().plan
    room = int(0.9 * CARD.total_bytes) - NEEDS.total_bytes
    assert room - 16 * WANTED.kv_bytes_per_token < plan.kv_pool_bytes <= room
    assert plan.max_model_len == 40960


def test_the_share_is_of_the_whole_device_whoever_else_is_there() -> None:
    """Two workers of 0.45 each fit one card."""
    second = replace(CARD, others_bytes=int(0.46 * CARD.total_bytes))
    assert divided(second, share=0.45).plan == divided(share=0.45).plan


def test_what_others_hold_is_never_taken() -> None:
    full = replace(CARD, others_bytes=100 * GIB)
    division = divided(full)
    assert division.plan.kv_pool_bytes <= 40 * GIB - NEEDS.total_bytes - RESERVE_BYTES
    assert division.free_bytes >= RESERVE_BYTES


def test_a_size_that_is_given_is_absolute() -> None:
    division = divided(kv_bytes=110 * GIB, share=0.1)
    assert 110 * GIB - 3 * MIB < division.plan.kv_pool_bytes <= 110 * GIB


def test_never_more_blocks_than_requests_can_use() -> None:
    plan = divided(max_num_seqs=4, max_model_len=1000).plan
    assert plan.num_blocks == 4 * 63 + 1


def test_the_length_is_lowered_to_what_fits_unless_it_is_asked_for() -> None:
    small = replace(CARD, total_bytes=20 * GIB)
    fitting = divided(small, share=0.9).plan.max_model_len
    assert 0 < fitting < 40960
    text = sentence(small, max_model_len=40960)
    assert f"--max-model-len {fitting}" in text


def test_a_length_beyond_the_model() -> None:
    with pytest.raises(SettingsError, match="choose 1 to 40960"):
        divided(max_model_len=40961)


def test_the_sentence_says_what_is_taken_by_whom() -> None:
    tenant = Tenant(71, "python3", 3 * GIB)
    card = replace(CARD, total_bytes=20 * GIB, others_bytes=4 * GIB, tenants=(tenant,))
    text = sentence(card, replace(NEEDS, weights_bytes=16 * GIB))
    assert "llama does not fit NVIDIA H200: of 20.0 GiB, 4.0 GiB were in use before" in text
    assert "(python3, process 71: 3.0 GiB)" in text
    assert text.endswith(
        "stop what else runs there, choose another GPU with CUDA_VISIBLE_DEVICES, or serve a "
        "smaller model"
    )


def test_a_pool_that_is_too_large_or_too_small() -> None:
    assert "--kv-cache-memory" in sentence(kv_bytes=130 * GIB)
    assert f"set --kv-cache-memory {2 * 16 * WANTED.kv_bytes_per_token}" in sentence(kv_bytes=MIB)


FIELDS = {
    "--gpu-memory-utilization": ("share", float),
    "--kv-cache-memory": ("kv_bytes", parse_bytes),
    "--max-model-len": ("max_model_len", int),
    "--max-num-batched-tokens": ("step_tokens", int),
    "--max-num-seqs": ("max_num_seqs", int),
}


@settings(deadline=None)
@given(
    card=st.builds(
        Card,
        name=st.just("card"),
        total_bytes=st.integers(GIB, 40 * GIB),
        others_bytes=st.integers(0, 20 * GIB),
    ),
    needs=st.builds(
        Needs,
        weights_bytes=st.integers(0, 20 * GIB),
        slots_bytes=st.integers(0, 4 * GIB),
        step_bytes=st.integers(0, 8 * GIB),
        step_bytes_per_token=st.floats(0, 1e6),
        graphs_bytes=st.integers(0, GIB),
    ),
    share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    kv_bytes=st.none() | st.integers(0, 8 * GIB),
    max_model_len=st.just("auto") | st.integers(1, 40960),
    max_num_seqs=st.integers(1, 300),
    step_tokens=st.integers(1, 10_000),
)
def test_a_plan_keeps_its_promises_and_every_remedy_works(card, needs, **changes) -> None:
    wanted = replace(WANTED, **changes)
    try:
        division = divide("llama", card, needs, wanted)
    except StartupError as error:
        named = " or ".join(remedies(card, needs, wanted)) or "serve a smaller model"
        if not str(error).endswith(named):
            raise
        for remedy in remedies(card, needs, wanted):
            flag, value = remedy.split()
            field, read = FIELDS[flag]
            changed = replace(wanted, **{field: read(value)})
            divide("llama", card, needs.at(wanted, changed), changed)
        return
    plan = division.plan
    assert division.free_bytes >= RESERVE_BYTES
    assert plan.fitting_requests >= 1
    if wanted.kv_bytes is None:
        assert needs.total_bytes + plan.kv_pool_bytes <= wanted.share * card.total_bytes
    if wanted.max_model_len != "auto":
        assert plan.max_model_len == wanted.max_model_len
    assert plan.kv_tokens < wanted.max_num_seqs * (plan.max_model_len + 16)


def test_remedies_are_the_mildest() -> None:
    tight = replace(CARD, total_bytes=18 * GIB + 100 * MIB)
    assert list(remedies(tight, NEEDS, replace(WANTED, share=0.92))) == [
        "--gpu-memory-utilization 0.926",
        "--max-num-batched-tokens 7040",
        "--max-num-seqs 149",
    ]


def test_weights_that_do_not_fit_are_found_before_they_are_loaded() -> None:
    check_weights("llama", CARD, 138 * GIB, 138 * GIB)
    with pytest.raises(StartupError, match=r"llama, 150\.0 GiB, do not fit .* a smaller model$"):
        check_weights("llama", CARD, 150 * GIB, 150 * GIB)
    with pytest.raises(StartupError, match=r"set --dtype bfloat16$"):
        check_weights("llama", CARD, 150 * GIB, 75 * GIB)


def test_a_step_that_does_not_fit_names_what_was_found_to() -> None:
    passed = replace(WANTED, step_tokens=2048)
    assert str(step_too_large("llama", CARD, WANTED, passed)).endswith(
        "set --max-num-batched-tokens 2048"
    )
    passed = replace(passed, max_num_seqs=128)
    assert str(step_too_large("llama", CARD, WANTED, passed)).endswith(
        "set --max-num-batched-tokens 2048 --max-num-seqs 128"
    )
    assert "a smaller model" in str(step_too_large("llama", CARD, WANTED, None))


def test_what_makes_steps_smaller_is_halved_until_they_fit() -> None:
    assert lowered(WANTED, "max_num_seqs") == replace(WANTED, max_num_seqs=128)
    assert lowered(replace(WANTED, max_num_seqs=1), "max_num_seqs") is None
    assert lowered(replace(WANTED, fewest_step_tokens=5000), "step_tokens") is None
    # A step takes 1 GiB, of which 0.76 are its tokens'; the room is 0.5 GiB short.
    tight = replace(CARD, total_bytes=18 * GIB - 512 * MIB)
    fits = lowered_to_fit(tight, NEEDS, replace(WANTED, share=1.0))
    assert fits is not None
    assert fits.step_tokens == 2048
    assert divide("llama", tight, NEEDS.at(WANTED, fits), fits)
    assert lowered_to_fit(replace(CARD, total_bytes=GIB), NEEDS, WANTED) is None


def test_memory_that_went_meanwhile() -> None:
    text = ran_out("llama", CARD)
    assert "ran out of memory while llama was started" in text
    assert "\n" not in text


def test_the_numbers_of_a_start() -> None:
    card = replace(CARD, tenants=(Tenant(71, "python3", 300 * MIB),))
    lines = dict(division_table(divided(card), WANTED))
    assert lines["device"] == "NVIDIA H200, 140.0 GiB"
    assert lines["in use before"] == (
        "1.0 GiB (python3, process 71: 300.0 MiB; CUDA itself 724.0 MiB)"
    )
    assert lines["largest step"] == "1.2 GiB (8,192 tokens, 256 requests)"
    assert re.fullmatch(
        r"109\.2 GiB: 55,\d{3} blocks, 89\d,\d{3} tokens, 21 requests of 40,960 tokens",
        lines["KV pool"],
    )
    figures = division_figures(divided(card), WANTED)
    assert figures["step_bytes"] == NEEDS.slots_bytes + NEEDS.step_bytes
    parts = [f"{part}_bytes" for part in ("others", "weights", "step", "graphs", "kv_pool", "free")]
    assert sum(figures[part] for part in parts) == figures["total_bytes"]


LISTED = """\
GPU-aaaa, 10, 500, /usr/bin/python3
GPU-aaaa, 71, 3072, /opt/My, Server
GPU-bbbb, 99, 12, other
GPU-aaaa, 72, [N/A], hidden
GPU-aaaa, 73, 4096, [Not Found]
"""


def test_tenants_are_the_other_processes_of_the_device() -> None:
    assert parse_tenants(LISTED, "GPU-aaaa", 10) == [
        Tenant(73, "[Not Found]", 4096 * MIB),
        Tenant(71, "My, Server", 3072 * MIB),
    ]
    assert parse_tenants(LISTED, "bbbb", 99) == []


def test_a_list_of_another_pid_namespace_names_nobody() -> None:
    assert parse_tenants(LISTED, "aaaa", 1) == []
    assert parse_tenants("No devices were found\n", "aaaa", 1) == []
