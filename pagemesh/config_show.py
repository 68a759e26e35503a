"""What `pagemesh config show` prints: every setting, its value and where the value came from."""

from __future__ import annotations

import msgspec

from pagemesh.shared.registry import MASK
from pagemesh.shared.settings_shown import shown_value
from pagemesh.shared.settings_sources import Loaded, SettingField, setting_fields


def settings_table(loaded: Loaded) -> str:
    """One line per setting, by section. Secrets are masked."""
    fields = setting_fields().values()
    rows = [(field, _text(loaded, field), loaded.origins[field.key]) for field in fields]
    key_width = max(len(field.key) for field in fields)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    lines: list[str] = []
    section = ""
    for field, value, origin in rows:
        if field.section != section:
            section = field.section
            lines.append(f"{section}:")
        lines.append(f"  {field.key:<{key_width}}  {value:<{value_width}}  {origin}")
    return "\n".join(lines)


def _text(loaded: Loaded, field: SettingField) -> str:
    value = shown_value(loaded.settings, field)
    return MASK if value == MASK else msgspec.json.encode(value).decode()
