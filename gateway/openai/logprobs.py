"""Logprobs in the shapes of chat, of completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Final

from pagemesh.shared.messages import TokenLogprob

# JSON has no -inf; clients know this value from vLLM.
LOWEST: Final = -9999.0


def finite(logprob: float) -> float:
    """NaN counts as the lowest, since no comparison with it holds."""
    return logprob if logprob > LOWEST else LOWEST


def with_ids_as_text(rows: Iterable[TokenLogprob]) -> list[TokenLogprob]:
    """The rows with `token_id:N` in place of each token's text."""
    return [
        row._replace(
            token=id_as_text(row.token_id),
            top=[
                (token_id, id_as_text(token_id), data, value, rank)
                for token_id, _, data, value, rank in row.top
            ],
        )
        for row in rows
    ]


def id_as_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def chat_logprobs(rows: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_chat_row(row) for row in rows], "refusal": None}


def _chat_row(row: TokenLogprob) -> dict[str, Any]:
    top = [_chat_token(token, data, value) for _, token, data, value, _ in row.top]
    return _chat_token(row.token, row.data, row.logprob) | {"top_logprobs": top}


def _chat_token(token: str, data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": finite(logprob), "bytes": list(data)}


def prompt_logprobs(
    rows: Iterable[TokenLogprob | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Per prompt token a map from token id to logprob, rank and text, the token itself first."""
    if rows is None:
        return None
    return [None if row is None else _prompt_row(row) for row in rows]


def _prompt_row(row: TokenLogprob) -> dict[str, Any]:
    entries = [(row.token_id, row.token, row.data, row.logprob, row.rank), *row.top]
    return {
        str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": token}
        for token_id, token, _, value, rank in reversed(entries)
    }


class CompletionLogprobs:
    """The parallel lists of one completions choice, in pieces as the text grows.

    `text_offset` counts characters of the text before the token. It follows the tokens' raw bytes,
    so the tokens of a character split in three all point at it.
    """

    def __init__(self, offset_chars: int = 0) -> None:
        self._offset_chars = offset_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(
        self,
        rows: Iterable[TokenLogprob],
        *,
        first_prompt_token: str | None = None,
        prompt_text: str = "",
    ) -> dict[str, Any]:
        """The lists for `rows`, after the first prompt token (which has no logprob) if given."""
        piece: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if first_prompt_token is not None:
            # A BOS token that is not part of the text takes no room in it.
            width = len(first_prompt_token) if prompt_text.startswith(first_prompt_token) else 0
            self._append(piece, first_prompt_token, None, None, width)
        for row in rows:
            width = len(self._decoder.decode(row.data))
            self._append(piece, row.token, finite(row.logprob), _top_map(row), width)
        return piece

    def _append(
        self,
        piece: dict[str, list[Any]],
        token: str,
        logprob: float | None,
        top: dict[str, float] | None,
        width_chars: int,
    ) -> None:
        piece["tokens"].append(token)
        piece["token_logprobs"].append(logprob)
        piece["top_logprobs"].append(top)
        piece["text_offset"].append(self._offset_chars)
        self._offset_chars += width_chars


def _top_map(row: TokenLogprob) -> dict[str, float]:
    """The best alternatives and the token itself; of two ids with equal text the better stays."""
    best: dict[str, float] = {}
    for token, value in [
        *((text, value) for _, text, _, value, _ in row.top),
        (row.token, row.logprob),
    ]:
        best[token] = max(best.get(token, LOWEST), finite(value))
    return best
