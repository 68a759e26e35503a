"""Answers to Tokenize and Detokenize: pure, and slow enough for a thread of their own."""

from __future__ import annotations

from pagemesh.shared.wire import Detokenize, Detokenized, Tokenize, Tokenized, pack_ids
from pagemesh.tokenizer_svc.text_model import TextModel


def tokenized(model: TextModel, question: Tokenize, max_model_len: int) -> Tokenized:
    """Raises RequestError for a prompt that cannot be encoded; an empty one has no tokens."""
    ids = model.encode(question.prompt)
    strs = list(map(model.token_str, ids)) if question.want_token_strs else None
    return Tokenized(question.request_id, pack_ids(ids), strs, max_model_len)


def detokenized(model: TextModel, question: Detokenize) -> Detokenized:
    """The text with its special tokens. Raises RequestError for ids outside the vocabulary."""
    ids = model.checked_ids(question.token_ids, param="tokens")
    return Detokenized(question.request_id, model.decode(ids, skip_special_tokens=False))
