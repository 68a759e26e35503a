"""The engine in this process, with the settings of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import setting_fields

if TYPE_CHECKING:
    from pagemesh import LLM


def offline_llm(settings: Settings) -> LLM:
    """The offline class, with what its keywords do not read (a --config file) read already."""
    from pagemesh import LLM

    return LLM(
        **{
            field.key: getattr(getattr(settings, field.section), field.key)
            for field in setting_fields().values()
        }
    )
