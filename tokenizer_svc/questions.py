"""Answers to what is asked beside generations: pure, and slow enough for a thread of their own."""

from __future__ import annotations

from pagemesh.shared.messages import (
    Detokenize,
    Detokenized,
    ModelCard,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
)
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.admission import prepare_request
from pagemesh.tokenizer_svc.checks import check_question, param_of
from pagemesh.tokenizer_svc.text_model import TextModel


def answer_to(
    model: TextModel, question: Tokenize | Detokenize, max_model_len: int
) -> Tokenized | Detokenized:
    """Raises RequestError for what cannot be encoded or decoded, and for what is too much."""
    if isinstance(question, Tokenize):
        return tokenized(model, question, max_model_len)
    return detokenized(model, question, max_model_len)


def tokenized(model: TextModel, question: Tokenize, max_model_len: int) -> Tokenized:
    """An empty prompt has no tokens."""
    prompt = question.prompt
    text = model.text_of(prompt)
    n_units = len(prompt.token_ids or b"") // 4 if text is None else len(text)
    check_question(n_units, max_model_len, param=param_of(prompt))
    ids = model.encode_as(prompt, text)
    strs = list(map(model.token_str, ids)) if question.want_token_strs else None
    return Tokenized(question.request_id, pack_ids(ids), strs, max_model_len)


def detokenized(model: TextModel, question: Detokenize, max_model_len: int) -> Detokenized:
    """The text with its special tokens."""
    check_question(len(question.token_ids) // 4, max_model_len, param="tokens")
    ids = model.checked_ids(question.token_ids, param="tokens")
    return Detokenized(question.request_id, model.decode(ids, skip_special_tokens=False))


def rendered(model: TextModel, question: Render, card: ModelCard) -> Rendered:
    """`card` is of the model's engines. Raises RequestError as the generation would."""
    prepared = prepare_request(model, question.generate, card)
    text = prepared.prompt_text or ""
    return Rendered(question.request_id, prepared.prompt_ids, text, prepared.params)
