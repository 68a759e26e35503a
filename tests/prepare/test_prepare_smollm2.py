"""The built-in model, for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemesh.shared.prepared import load_prepared


@pytest.mark.model
def test_builtin_model_is_prepared_whole(smollm2_folder: Path) -> None:
    prepared = load_prepared(smollm2_folder)
    assert prepared.name == "smollm2-135m-instruct"
    assert prepared.weights_format == "gguf"
    assert prepared.eos_token_ids == [2]
    assert (prepared.vocab_tokens, prepared.max_position_tokens) == (49152, 8192)
    assert prepared.template_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (smollm2_folder / "chat_template.jinja").read_text()
