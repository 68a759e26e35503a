"""The memory plan: pure arithmetic and its sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import MaxModelLen
from pagemesh.worker_svc.memory import (
    CPU_LIMIT_BYTES,
    MemoryPlan,
    available_bytes,
    blocks_for,
    budget_tokens,
    is_out_of_memory,
    parse_bytes,
    plan_memory,
    pool_bytes_on_cpu,
    pool_line,
    show_bytes,
)

MIB, GIB = 2**20, 2**30


def plan(pool_bytes: int, max_model_len: MaxModelLen = "auto", max_num_seqs: int = 4) -> MemoryPlan:
    return plan_memory(
        kv_bytes_per_token=100,
        block_tokens=16,
        pool_bytes=pool_bytes,
        model_max_tokens=1000,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", MIB),
        ("1e9", 10**9),
        ("512MiB", 512 * MIB),
        ("2GiB", 2 * GIB),
        ("1.5 GiB", 1.5 * GIB),
        ("64kib", 64 * 1024),
        ("3GB", 3 * 10**9),
        ("10MB", 10**7),
        ("100b", 100),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1GiBs", "1..5GiB", "1e999", "GiB", "1 G B"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match="--kv-cache-memory") as error:
        parse_bytes(text)
    assert error.value.key == "kv_cache_memory"


def test_pool_on_a_cpu() -> None:
    assert pool_bytes_on_cpu(None, 2 * GIB) == GIB // 2
    assert pool_bytes_on_cpu(None, 64 * GIB) == CPU_LIMIT_BYTES
    assert pool_bytes_on_cpu(None, 8 * GIB, n_workers=4) == GIB // 2
    assert pool_bytes_on_cpu("3GiB", 4 * GIB) == 3 * GIB
    with pytest.raises(SettingsError, match=r"5GiB is more than the 4\.0 GiB"):
        pool_bytes_on_cpu("5GiB", 4 * GIB)


def test_no_more_blocks_than_can_be_used() -> None:
    assert plan(10**9).num_blocks == 4 * 63 + 1
    assert plan(10**9, max_model_len=20, max_num_seqs=3).num_blocks == 3 * 2 + 1


def test_the_division() -> None:
    divided = plan(100 * 1600)
    assert divided.num_blocks == 100
    assert divided.kv_tokens == 99 * 16
    assert divided.kv_pool_bytes == 160_000
    assert divided.max_model_len == 1000
    assert divided.fitting_requests == 99 // 63


def test_automatic_length_is_lowered_to_what_fits() -> None:
    divided = plan(11 * 1600)
    assert (divided.max_model_len, divided.fitting_requests) == (160, 1)
    assert plan(2 * 1600).max_model_len == 16


@settings(deadline=None)
@given(
    max_model_len=st.integers(1, 1000),
    pool_bytes=st.integers(0, 200_000),
    max_num_seqs=st.integers(1, 5),
)
def test_the_remedies_named_work(max_model_len: int, pool_bytes: int, max_num_seqs: int) -> None:
    try:
        divided = plan(pool_bytes, max_model_len, max_num_seqs)
    except StartupError as error:
        words = str(error).replace(":", "").split()
        needed = int(words[words.index("--kv-cache-memory") + 1])
        assert plan(needed, max_model_len, max_num_seqs).max_model_len == max_model_len
        assert needed > pool_bytes
        if "--max-model-len" in words:
            shorter = int(words[words.index("--max-model-len") + 1])
            assert plan(pool_bytes, shorter, max_num_seqs).max_model_len == shorter
    else:
        assert divided.max_model_len == max_model_len
        assert divided.fitting_requests >= 1
        assert divided.kv_pool_bytes <= pool_bytes


def test_a_pool_without_a_block() -> None:
    with pytest.raises(StartupError, match=r"set --kv-cache-memory 3200$"):
        plan(3199)


@pytest.mark.parametrize("length", [0, -4, 1001])
def test_a_length_beyond_the_model(length: int) -> None:
    with pytest.raises(SettingsError, match="choose 1 to 1000"):
        plan(10**9, max_model_len=length)


def test_budget() -> None:
    assert budget_tokens(None, chunked_prefill=True, max_model_len=9999) == 512
    assert budget_tokens(64, chunked_prefill=True, max_model_len=9999) == 64
    assert budget_tokens(None, chunked_prefill=False, max_model_len=512) == 512
    with pytest.raises(SettingsError, match="set --max-num-batched-tokens 513") as error:
        budget_tokens(None, chunked_prefill=False, max_model_len=513)
    assert error.value.key == "max_num_batched_tokens"


@pytest.mark.parametrize(
    ("limit", "used", "most"),
    [("max", "5", None), ("5000", "2000", 3000), ("5000", "9000", 0), ("what", "5", None)],
)
def test_the_control_group_limits_what_is_available(
    tmp_path: Path, limit: str, used: str, most: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    machine = available_bytes(tmp_path / "missing")
    room = available_bytes(tmp_path)
    assert room == most if most is not None else room > machine // 2


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] can't allocate memory: you tried to …"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_out_of_memory_is_recognised(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_the_line_of_the_pool_says_when_the_length_was_lowered() -> None:
    assert pool_line(plan(100 * 1600), 1000) == (
        "156.2 KiB: 100 blocks, 1,584 tokens, 1 request of 1,000 tokens"
    )
    assert pool_line(plan(11 * 1600), 1000).endswith("1 request of 160 tokens (the model: 1,000)")


def test_shown_sizes() -> None:
    shown = [show_bytes(n) for n in (12, 2048, 5 * MIB, 1.5 * GIB)]
    assert shown == ["12 bytes", "2.0 KiB", "5.0 MiB", "1.5 GiB"]
    assert blocks_for(17, 16) == 2
