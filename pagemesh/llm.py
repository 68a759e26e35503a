"""The offline class: the cores of the mesh in one process, without sockets or Redis."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec
import structlog

from pagemesh.beam_search import BeamSearch
from pagemesh.llm_answers import Answers, empty_output
from pagemesh.llm_beams import BeamSearches, check_beams
from pagemesh.llm_inputs import (
    Conversation,
    PromptInput,
    as_prompts,
    conversations,
    one_each,
)
from pagemesh.llm_loop import LLMLoop
from pagemesh.llm_metrics import Metric
from pagemesh.llm_progress import Progress
from pagemesh.outputs import EmbeddingRequestOutput, Output, RequestOutput
from pagemesh.prepare import prepare
from pagemesh.scheduler_svc.collector import rare_collections
from pagemesh.shared.errors import RequestError
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Generate, ModelCard, Prompt
from pagemesh.shared.model_list import of_one_model
from pagemesh.shared.pooling import NO_TOKENS, PoolingParams
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import LogSettings, ModelSettings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.tokenizer_svc.admission import Prepared
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.text_model import TextModel
from pagemesh.tokenizer_svc.text_models import TextModels

_SEEDS: Final = 2**63

OutputT = TypeVar("OutputT", bound=Output)


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

    def get_metrics(self) -> list[Metric]:
        """A snapshot of the engine's counters, gauges and histograms, by the names that a server's
        `/metrics` has."""
        with self._lock:
            return self._loop.metrics()

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
        return self._generate(as_prompts(prompts), sampling_params, use_tqdm)

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
            for conversation in conversations(messages)
        ]
        return self._generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, as `PoolingParams` say; outputs stand in the order of the
        prompts.

        Raises RequestError as `generate` does, and for a prompt that cannot be computed.
        """
        asked = as_prompts(prompts)
        pooling = one_each(pooling_params, PoolingParams(), len(asked), "pooling_params")
        generates = [
            msgspec.structs.replace(self._request(prompt, NO_TOKENS), pooling=one)
            for prompt, one in zip(asked, pooling, strict=True)
        ]
        return self._run(generates, EmbeddingRequestOutput.of, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        beam_width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The most probable answers of up to `max_tokens` tokens to each prompt, by a search that
        keeps `beam_width` of them at every token: they are the choices of its output, the best
        first. See `beam_search` for the rules, which are those of transformers.

        Raises RequestError as `generate` does, and for a `beam_width` that is too large.
        """
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        end_ids = [] if ignore_eos else self.card.eos_token_ids
        check_beams(beam_width, max_tokens, len(end_ids))
        generates = [self._request(prompt, params) for prompt in as_prompts(prompts)]
        with self._lock, rare_collections():
            checked = [self._check(*pair) for pair in enumerate(generates)]
            with Progress(len(checked), shown=use_tqdm) as progress:
                searches = BeamSearches(
                    checked,
                    lambda: BeamSearch(beam_width, max_tokens, length_penalty, end_ids),
                    n_at_once=max(1, self._loop.max_num_seqs // (2 * beam_width)),
                    progress=progress,
                )
                self._loop.run(searches.queue, searches.take)
        return searches.outputs()

    def _generate(
        self, prompts: list[Prompt], sampling_params: ParamsInput, use_tqdm: bool
    ) -> list[RequestOutput]:
        defaults = self.get_default_sampling_params()
        params = one_each(sampling_params, defaults, len(prompts), "sampling_params")
        generates = [self._request(*pair) for pair in zip(prompts, params, strict=True)]
        return self._run(generates, empty_output, use_tqdm)

    def _run(
        self,
        generates: list[Generate],
        output_of: Callable[[Prepared], OutputT],
        use_tqdm: bool,
    ) -> list[OutputT]:
        # Nothing is frozen, as the services do it: what the process holds is its owner's, who may
        # want it collected later.
        with self._lock, rare_collections():
            checked = [self._check(*pair) for pair in enumerate(generates)]
            outputs = [output_of(one) for one in checked]
            with (
                Progress(len(checked), shown=use_tqdm) as progress,
                Answers(self._pipeline, checked, outputs, progress) as answers,
            ):
                self._loop.run(answers.submits(), answers.take)
        return outputs

    def _request(self, prompt: Prompt, params: SamplingParams) -> Generate:
        if params.seed is None:
            params = params.with_seed(self._seeds.randrange(_SEEDS))
        return Generate(
            request_id=next(self._request_ids),
            attempt=0,
            model=self._loop.card.names[0],
            prompt=prompt,
            params=params,
            want_prompt_text=prompt.token_ids is None,
        )

    def _check(self, index: int, generate: Generate) -> Prepared:
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
