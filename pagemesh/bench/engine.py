"""The engine in this process, with the settings of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import setting_fields

if TYPE_CHECKING:
    from pagemesh import LLM

_SECTIONS: Final = ("model", "cache", "scheduler", "parallel")


def offline_llm(settings: Settings) -> LLM:
    """The offline class, with what its keywords do not read (a --config file) read already."""
    from pagemesh import LLM

    return LLM(
        **{
            field.key: getattr(getattr(settings, field.section), field.key)
            for field in setting_fields().values()
        }
    )


def computes_on_gpu(settings: Settings) -> bool:
    from pagemesh.worker_svc.build import choose_device

    return choose_device(settings) == "cuda"


def engine_settings(settings: Settings) -> dict[str, Any]:
    """What an engine's figures depend on, by section. No secrets."""
    return {name: getattr(settings, name) for name in _SECTIONS}
