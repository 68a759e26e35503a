"""The offline class: the cores of the mesh in one process, without sockets or Redis."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any, Final, TypedDict, cast

import msgspec
import structlog

from pagemesh.llm_answers import Answers
from pagemesh.llm_loop import LLMLoop
from pagemesh.llm_progress import Progress
from pagemesh.outputs import RequestOutput
from pagemesh.prepare import prepare
from pagemesh.scheduler_svc.collector import rare_collections
from pagemesh.shared.errors import RequestError
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Generate, ModelCard, Prompt
from pagemesh.shared.model_list import of_one_model
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import LogSettings, ModelSettings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.admission import Prepared
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel
from pagemesh.tokenizer_svc.text_models import TextModels

_SEEDS: Final = 2**63


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


PromptInput = str | TextPrompt | TokensPrompt
Conversation = list[dict[str, Any]]
ParamsInput = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process, for batches of prompts.

        llm = LLM("smollm2-135m-instruct", max_model_len=2048)
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

    Keywords are the settings of the server, by the same names; PAGEMESH_* variables count too. The
    same prompts, parameters and seeds give the token ids that the server gives.
    """

    def __init__(self, model: str = ModelSettings().model, **settings: Any) -> None:
        """Raises SettingsError for an unknown or unusable keyword, StartupError for a model that
        cannot be fetched, read or held in memory."""
        loaded = load_settings(
            {"model": model, **settings}, None, os.environ, override_origin="keyword"
        )
        self.settings: Final = of_one_model(loaded.settings)
        _configure_logging_unless_set_up(self.settings.log)
        folder = prepare(self.settings.model)
        text_model = TextModel(folder, load_prepared(folder), self.settings)
        self._pipeline = Pipeline(TextModels([text_model]))
        self._loop = LLMLoop(self.settings)
        self._seeds = random.Random(self.settings.gateway.seed)
        self._request_ids = map(str, count())
        self._lock = Lock()

    @property
    def card(self) -> ModelCard:
        """What the model is: names, vocabulary, longest sequence, block size."""
        return self._loop.card

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the model's own, by its generation_config.json."""
        defaults: dict[str, Any] = self.card.defaults
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ParamsInput = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs stand in the order of the prompts.

        `sampling_params` is one for all, or one a prompt. Raises RequestError, before anything
        runs, for the first prompt that cannot be served.
        """
        many = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        return self._run([_as_prompt(prompt) for prompt in many], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsInput = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Raises RequestError as `generate` does.
        """
        prompts = [
            Prompt(
                messages=conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation in _conversations(messages)
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def _run(
        self, prompts: list[Prompt], sampling_params: ParamsInput, use_tqdm: bool
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each(sampling_params, len(prompts))
        # Nothing is frozen, as the services do it: what the process holds is its owner's, who may
        # want it collected later.
        with self._lock, rare_collections():
            checked = [
                self._check(index, *pair)
                for index, pair in enumerate(zip(prompts, params, strict=True))
            ]
            with (
                Progress(len(checked), shown=use_tqdm) as progress,
                Answers(self._pipeline, checked, progress) as answers,
            ):
                self._loop.run(answers.submits(), answers.take)
        return answers.outputs

    def _check(self, index: int, prompt: Prompt, params: SamplingParams) -> Prepared:
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.randrange(_SEEDS))
        generate = Generate(
            request_id=next(self._request_ids),
            attempt=0,
            model=self._loop.card.names[0],
            prompt=prompt,
            params=params,
            want_prompt_text=prompt.token_ids is None,
        )
        try:
            return self._pipeline.prepare(generate, self._loop.card)
        except RequestError as error:
            raise RequestError(
                f"prompt {index}: {error.message}",
                status=error.status,
                code=error.code,
                param=error.param,
            ) from error


def _configure_logging_unless_set_up(settings: LogSettings) -> None:
    """A script gets the lines of the server on stderr; an application keeps its own logging."""
    if not structlog.is_configured() and not logging.getLogger().handlers:
        configure_logging("llm", settings)


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of messages is one conversation; a list of lists of messages is several."""
    if len(messages) > 0 and isinstance(messages[0], dict):
        return [cast(Conversation, messages)]
    return [list(conversation) for conversation in cast(Sequence[Conversation], messages)]


def _as_prompt(given: PromptInput) -> Prompt:
    """Raises RequestError for what is neither text nor token ids."""
    if isinstance(given, str):
        return Prompt(text=given)
    match given:
        case {"prompt_token_ids": [*ids]}:
            return Prompt(token_ids=_packed(ids))
        case {"prompt": str(text)}:
            return Prompt(text=text)
    raise RequestError(
        "a prompt is a string, {'prompt': text} or {'prompt_token_ids': [ids]}, "
        f"not {type(given).__name__}",
        param="prompts",
    )


def _packed(ids: list[Any]) -> bytes:
    try:
        return pack_ids(ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"prompt_token_ids must be whole numbers in the vocabulary ({error})",
            param="prompt_token_ids",
        ) from error


def _one_each(
    given: SamplingParams | Sequence[SamplingParams], n_prompts: int
) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * n_prompts
    if len(given) != n_prompts:
        raise RequestError(
            f"{n_prompts} prompts came with {len(given)} sampling_params: give one, or one each",
            param="sampling_params",
        )
    return list(given)
