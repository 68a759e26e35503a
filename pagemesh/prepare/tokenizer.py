"""Turning any tokenizer into `tokenizer.json`. Imports transformers, so it is imported late."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from pagemesh.shared.errors import StartupError

TOKENIZER_FILE: Final = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerFacts:
    """What a tokenizer says beside tokenizer.json. `special_tokens` are those templates name."""

    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_id: int | None
    template: str | None


def write_tokenizer(source: Path, target: Path, *, trust_remote_code: bool) -> TokenizerFacts:
    """Write the fast tokenizer of `source` (a folder or a .gguf file) into folder `target`.

    Raises StartupError when there is no tokenizer, or none that can be made fast.
    """
    tokenizer = _load(source, trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StartupError(
            f"the tokenizer of {source} ({type(tokenizer).__name__}) has no fast form: convert it "
            "to a tokenizer.json, or name another one with --tokenizer"
        )
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(target / TOKENIZER_FILE))
    return TokenizerFacts(
        special_tokens=_named_tokens(tokenizer.special_tokens_map),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        template=_plain_template(tokenizer.chat_template),
    )


def _load(source: Path, trust_remote_code: bool) -> Any:
    gguf = source.is_file()
    options: dict[str, Any] = {"gguf_file": source.name} if gguf else {}
    try:
        return AutoTokenizer.from_pretrained(
            source.parent if gguf else source,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **options,
        )
    except Exception as error:
        # transformers defines no exception here: a broken file can raise anything.
        raise StartupError(_failure(source, error)) from error


def _failure(source: Path, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"the tokenizer of {source} is Python code that ships with the model: read it, and if "
            "you trust it run again with --trust-remote-code"
        )
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{source} has no tokenizer that can be read ({first}): name another with --tokenizer"


def _named_tokens(special_tokens_map: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token …; the unnamed further ones come as a list and are left out."""
    return {
        name: str(token)
        for name, token in special_tokens_map.items()
        if not isinstance(token, list)
    }


def _plain_template(template: str | dict[str, str] | None) -> str | None:
    """The template of plain chats where a model brings several by name."""
    return template.get("default") if isinstance(template, dict) else template
