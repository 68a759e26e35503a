"""From a Generate to placements: pure, and slow enough for a thread of its own."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.errors import RequestError
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.messages import Generate, ModelCard, Prompt
from pagemesh.shared.sampling import SamplingParams, child_seed
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.checks import (
    check_choices,
    check_params,
    check_pooling,
    check_prompt,
    check_prompt_logprobs,
    check_question,
    check_text,
    param_of,
    resolve_max_tokens,
)
from pagemesh.tokenizer_svc.text_model import TextModel
from pagemesh.tokenizer_svc.token_rules import bad_word_ids, thinking_budget


class Prepared(NamedTuple):
    """A request that passed every check. `params.max_tokens` is known, and so is how to pool;
    `hashes` are packed; `in_reasoning` as in Accepted."""

    text_model: TextModel
    generate: Generate
    card: ModelCard
    params: SamplingParams
    prompt_ids: bytes
    prompt_text: str | None
    in_reasoning: bool
    hashes: bytes


def prepare_request(text_model: TextModel, generate: Generate, card: ModelCard) -> Prepared:
    """Raises RequestError for a request that the model can never serve."""
    check_params(generate.params, text_model)
    _check_prior_ids(generate, text_model)
    ids, text = _encode(text_model, generate, card)
    check_prompt_logprobs(generate.params, len(ids))
    check_pooling(generate.pooling, card)
    prompt_ids = pack_ids(ids)
    params = _worded(generate.params, text_model, generate.prompt, text)
    if params.n > 1:
        check_choices(params.n, _params_of_choice(params, 0, resumed=False))
    hashes = chain_hashes(prompt_ids, card.block_tokens, salt=generate.cache_salt)
    return Prepared(
        text_model=text_model,
        generate=msgspec.structs.replace(
            generate, prompt=Prompt(), pooling=text_model.pooling(generate.pooling)
        ),
        card=card,
        params=resolve_max_tokens(params, len(ids), card),
        prompt_ids=prompt_ids,
        prompt_text=text if generate.want_prompt_text else None,
        in_reasoning=text_model.in_reasoning(generate.prompt, text),
        hashes=b"".join(hashes),
    )


def _worded(
    params: SamplingParams, text_model: TextModel, prompt: Prompt, text: str | None
) -> SamplingParams:
    """`params` for an answer to `prompt`, whose text is `text`, as a worker understands them, which
    knows no text."""
    if params.structured_outputs is not None:
        rule = text_model.after_reasoning(params.structured_outputs, prompt, text)
        params = msgspec.structs.replace(params, structured_outputs=rule)
    if params.bad_words:
        ids = bad_word_ids(params.bad_words, text_model)
        params = msgspec.structs.replace(params, bad_word_ids=ids)
    if params.thinking_token_budget is not None:
        thinking = thinking_budget(params.thinking_token_budget, text_model, prompt, text)
        # A rule that holds from the beginning leaves no reasoning to end.
        held = params.structured_outputs
        if held is None or held.begins_after is not None:
            params = msgspec.structs.replace(params, thinking=thinking)
    return params


def _check_prior_ids(generate: Generate, text_model: TextModel) -> None:
    prior = generate.prior_ids
    if prior and len(prior) != generate.params.n:
        raise RequestError(f"prior_ids holds {len(prior)} choices, not n={generate.params.n}")
    for ids in prior:
        text_model.checked_ids(ids, param="prior_ids")


def _encode(
    text_model: TextModel, generate: Generate, card: ModelCard
) -> tuple[list[int], str | None]:
    """The prompt's ids, which the model has room for, and its text if that is known or wanted."""
    prompt = generate.prompt
    text = text_model.text_of(prompt)
    if prompt.extras is not None and prompt.extras.truncate_tokens:
        return _encode_end(text_model, generate, card, text, prompt.extras.truncate_tokens)
    if text is not None:
        check_text(prompt, text_model.vocabulary.min_tokens(text), card.max_model_len)
    ids = text_model.encode_as(prompt, text)
    check_prompt(prompt, len(ids), card.max_model_len, room=_room(generate.params))
    if text is None and generate.want_prompt_text:
        text = text_model.decode(ids, skip_special_tokens=False)
    return ids, text


def _encode_end(
    text_model: TextModel, generate: Generate, card: ModelCard, text: str | None, most: int
) -> tuple[list[int], str | None]:
    """`_encode` of a prompt of which the last `most` tokens count, -1: as many as fit. The text is
    theirs."""
    prompt, params = generate.prompt, generate.params
    n_units = len(prompt.token_ids or b"") // 4 if text is None else len(text)
    check_question(n_units, card.max_model_len, param=param_of(prompt))
    ids = text_model.encode_as(prompt, text)
    if most < 0:
        most = max(1, card.max_model_len - max(_room(params), params.max_tokens or 0))
    if len(ids) > most:
        ids = ids[-most:]
        text = text_model.decode(ids, skip_special_tokens=False)
    check_prompt(prompt, len(ids), card.max_model_len, room=_room(params))
    if text is None and generate.want_prompt_text:
        text = text_model.decode(ids, skip_special_tokens=False)
    return ids, text


def _room(params: SamplingParams) -> int:
    """How many tokens must fit behind the prompt at least."""
    return 0 if params.max_tokens == 0 else 1


def submit_of_choice(prepared: Prepared, index: int, key: int) -> Submit:
    """The placement of choice `index`; its engine is chosen later."""
    generate = prepared.generate
    prior_ids = generate.prior_ids[index] if generate.prior_ids else b""
    params = _params_of_choice(prepared.params, index, resumed=bool(prior_ids))
    assert params.seed is not None  # a child of the request's
    return Submit(
        key=key,
        request_id=generate.request_id,
        attempt=generate.attempt,
        engine_id="",
        prompt_ids=prepared.prompt_ids,
        prior_ids=prior_ids,
        seed=params.seed,
        params=params,
        hashes=prepared.hashes,
        priority=generate.priority,
        arrival_s=generate.arrival_s,
        cache_salt=generate.cache_salt,
        group=_group(prepared),
        choice=index,
        pooling=generate.pooling,
    )


def _params_of_choice(params: SamplingParams, index: int, *, resumed: bool) -> SamplingParams:
    """What its engine needs to know. What is written in words stays here."""
    if params.seed is None:
        raise RequestError("seed is missing: it is drawn where the request enters", param="seed")
    return msgspec.structs.replace(
        params,
        n=1,
        seed=child_seed(params.seed, index),
        stop=[],
        bad_words=None,
        thinking_token_budget=None,
        # They come once, with the first delta of choice 0; a resumed choice has had one.
        prompt_logprobs=params.prompt_logprobs if index == 0 and not resumed else None,
    )


def _group(prepared: Prepared) -> str:
    """Choices that start together share the prompt's blocks; resumed ones stand alone."""
    generate = prepared.generate
    if prepared.params.n == 1 or any(generate.prior_ids):
        return ""
    return f"{generate.request_id}/{generate.attempt}"
