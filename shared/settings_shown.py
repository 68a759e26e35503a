"""Settings as people may see them: without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from pagemesh.shared.registry import MASK, masked_url
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import SettingField, setting_fields


def shown_value(settings: Settings, field: SettingField) -> Any:
    """Plain values; MASK for a secret, and in the place of a password in a URL."""
    value: Any = getattr(getattr(settings, field.section), field.key)
    if field.secret and value:
        return MASK
    return msgspec.json.decode(masked_url(msgspec.json.encode(value).decode()))


def shown_settings(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every setting, by section."""
    shown: dict[str, dict[str, Any]] = {}
    for field in setting_fields().values():
        shown.setdefault(field.section, {})[field.key] = shown_value(settings, field)
    return shown
