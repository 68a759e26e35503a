"""Writing `tokenizer.json` and reading what else a tokenizer says. Imports transformers (late)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagemesh.shared.errors import StartupError

TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"


@dataclass(frozen=True)
class TokenizerFacts:
    """What the manifest needs. `special_tokens` are those that chat templates name."""

    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_id: int | None


def write_tokenizer(
    source: Path, target: Path, *, gguf_file: str | None, trust_remote_code: bool
) -> TokenizerFacts:
    """Write the fast tokenizer of folder `source` and its chat template into folder `target`.

    With `gguf_file` the tokenizer is read from that file of `source`. Raises StartupError when
    there is no tokenizer, or none that can be made fast.
    """
    tokenizer = _load(source, gguf_file, trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StartupError(
            f"the tokenizer of {source} ({type(tokenizer).__name__}) has no fast form: convert it "
            "to a tokenizer.json, or name another one with --tokenizer"
        )
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(target / TOKENIZER_FILE))
    template = default_template(tokenizer.chat_template)
    if template is not None:
        (target / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return _facts(tokenizer)


def default_template(template: str | dict[str, str] | None) -> str | None:
    """The template for plain chats where a model brings several by name."""
    if isinstance(template, dict):
        return template.get("default")
    return template


def _load(source: Path, gguf_file: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
    except Exception as error:
        # transformers has no exception of its own here: anything may come out of a broken file.
        raise StartupError(_load_failure(source, error)) from error


def _load_failure(source: Path, error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if "trust_remote_code" in str(error):
        return (
            f"the tokenizer of {source} is Python code that ships with the model: read it, and if "
            "you trust it run again with --trust-remote-code"
        )
    return (
        f"{source} has no tokenizer that can be read ({first}); name another one with --tokenizer"
    )


def _facts(tokenizer: Any) -> TokenizerFacts:
    named = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if not isinstance(token, list)
    }
    return TokenizerFacts(named, tokenizer.bos_token_id, tokenizer.eos_token_id)


def read_template_option(option: str) -> str:
    """The text of --chat-template, which is a file or the template itself."""
    if "{" in option or "\n" in option:
        return option
    path = Path(option).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {option}: cannot be read ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises StartupError when it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StartupError(f"{path} is missing: {path.parent} is no complete model folder") from (
            error
        )
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value
