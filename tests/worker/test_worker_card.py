"""Which cards are refused, and with what words."""

from __future__ import annotations

import re

import pytest
import torch
from structlog.testing import capture_logs

from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import ModelSettings, ParallelSettings, Settings
from pagemesh.worker_svc.build import choose_device
from pagemesh.worker_svc.gpu import card
from pagemesh.worker_svc.gpu.card import require_card, why_not


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose PyTorch sees a GPU; Triton is there."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return monkeypatch


def settings(device: str, **model: str) -> Settings:
    return Settings(
        parallel=ParallelSettings(device=device),  # type: ignore[arg-type]
        model=ModelSettings(**model),  # type: ignore[arg-type]
    )


def test_a_card_that_can_be_used(hopper: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    assert choose_device(settings("auto")) == "cuda"
    assert choose_device(settings("cuda")) == "cuda"
    assert choose_device(settings("cpu")) == "cpu"


def test_a_card_older_than_ampere(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    hopper.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    sentence = "Tesla T4 has compute capability 7.5, and the kernels need 8.0"
    with pytest.raises(StartupError, match=sentence):
        require_card()
    with pytest.raises(SettingsError, match=sentence):
        choose_device(settings("cuda"))
    assert choose_device(settings("auto")) == "cpu"


def test_rocm(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.version, "hip", "6.3")
    with pytest.raises(StartupError, match="built for ROCm"):
        require_card()


@pytest.mark.parametrize(
    ("patched", "sentence"),
    [
        ((torch.version, "hip", "6.3"), "built for ROCm"),
        ((torch.cuda, "get_device_capability", lambda: (7, 5)), "needs? 8.0"),
        ((torch.cuda, "is_available", lambda: False), None),
    ],
)
def test_a_card_that_auto_passes_over_is_told_of(
    hopper: pytest.MonkeyPatch, patched: tuple[object, str, object], sentence: str | None
) -> None:
    hopper.setattr(*patched)
    with capture_logs() as logs:
        assert choose_device(settings("auto")) == "cpu"
    reasons = [line["reason"] for line in logs if line["event"] == "gpu_left_alone"]
    if sentence is None:
        assert reasons == []
    else:
        [reason] = reasons
        assert re.search(sentence, reason)


def test_no_card(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="CUDA_VISIBLE_DEVICES"):
        require_card()


def test_no_triton(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(card, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install triton"):
        require_card()


def test_int8_weights_are_the_cpus(hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="not supported on a GPU"):
        choose_device(settings("auto", quantization="int8"))
