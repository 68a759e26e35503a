"""Models of the Hugging Face Hub, through huggingface_hub and its cache.

`HF_ENDPOINT`, `HF_TOKEN` (or `HUGGING_FACE_HUB_TOKEN`), `HF_HOME` and `HF_HUB_OFFLINE` act as
everywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pagemesh.prepare.report import Report
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import ModelSettings

_TOKENIZER_FILES: Final = [
    "tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
_CONFIG_FILES: Final = ["config.json", "generation_config.json", "*.safetensors.index.json"]
_WEIGHT_FILES: Final = ["*.safetensors"]
# Copies of the weights in other forms: sub-folders (onnx/, original/) and Mistral's own format.
_IGNORED: Final = ["*/*", "consolidated*"]


def fetch(model: ModelSettings, report: Report, check_config: Callable[[Path], None]) -> Path:
    """The snapshot folder of a Hub model, named after its commit; downloads what is missing.

    `check_config` sees the folder before the weights are fetched; it raises for a model that cannot
    be served. Raises StartupError when the Hub says no or cannot be reached.
    """
    repo = model.model
    report(f"looking up {repo} on the Hub")
    code = ["*.py"] if model.trust_remote_code else []
    folder = _snapshot(repo, model.revision, _CONFIG_FILES + _TOKENIZER_FILES + code)
    if not (folder / "config.json").is_file():
        raise StartupError(
            f"{repo} has no config.json, so it is no transformers model (of a repository of GGUF "
            "files, download one and give its path)"
        )
    check_config(folder)
    if model.load_format == "auto":
        report(f"fetching the weights of {repo}")
        _snapshot(repo, folder.name, _WEIGHT_FILES)
        if not any(folder.glob("*.safetensors")):
            raise StartupError(
                f"{repo} has no safetensors weights (pickle files, which can run code when loaded, "
                "are not fetched)"
            )
    return folder


def fetch_tokenizer(repo: str, *, trust_remote_code: bool) -> Path:
    """The snapshot folder with the tokenizer of `repo` (for --tokenizer)."""
    code = ["*.py"] if trust_remote_code else []
    return _snapshot(repo, None, ["config.json", *_TOKENIZER_FILES, *code])


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
        )
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{repo} is gated: accept its terms on its Hub page and set HF_TOKEN to your token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"{repo} has no revision {revision!r} on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"the Hub knows no model {repo} (or it is private: then set HF_TOKEN); "
            "a local folder must exist under exactly that path"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"the Hub cannot be reached and {repo} is not on this machine: check the network "
            "(HF_ENDPOINT, HF_HUB_OFFLINE) or give a local folder"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise StartupError(f"fetching {repo} from the Hub failed: {error}") from error
