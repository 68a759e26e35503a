"""The written form of the schema: documentation and defaults are interfaces."""

from __future__ import annotations

from pathlib import Path

import yaml

from pagemesh.settings_docs import settings_markdown
from pagemesh.shared.settings_sources import load_settings, setting_fields

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_defaults.yaml")


def test_the_documentation_is_the_schema() -> None:
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == settings_markdown(), "run `make docs`"


def test_defaults_are_golden() -> None:
    defaults = {field.key: field.default for field in setting_fields().values()}
    golden = yaml.safe_load(GOLDEN.read_text())
    assert defaults == golden, "a changed default needs a line in CHANGELOG.md and in this file"


def test_the_golden_file_is_a_settings_file() -> None:
    loaded = load_settings({}, GOLDEN, {})
    assert loaded.settings == load_settings({}, None, {}).settings
    assert set(loaded.origins.values()) == {str(GOLDEN)}
