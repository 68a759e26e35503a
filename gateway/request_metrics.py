"""What clients see of each model and engine: counts, token totals and times.

A choice is one completion of one prompt: a request of two prompts with n=3 holds six. At every
scrape, per model,

    received = finished (over all reasons and engines) + in flight

Plain numbers of one event loop, so that a delta costs well under a microsecond; `request_series`
shows them to Prometheus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from functools import reduce
from typing import Final

from pagemesh.shared.distribution import Observations
from pagemesh.shared.ledger import Ledger
from pagemesh.shared.messages import Begun
from pagemesh.shared.sampling import SamplingParams

NO_ENGINE: Final = ""
FORMER: Final = "(former)"
# Each restart of a worker is another engine, and its series must not pile up.
MAX_FORMER_ENGINES: Final = 4

# vLLM's bounds, continued downwards for small models.
FIRST_TOKEN_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_GAP_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
PHASE_S: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8),
    *(1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKENS: Final = (*(step * 10**power for power in range(6) for step in (1, 2, 5)), 10**6)
PARAM_N: Final = (1, 2, 5, 10, 20)
FINISH_REASONS: Final = ("stop", "length", "abort", "error")


class EngineTally:
    """Of the choices that one engine generated, for one model."""

    def __init__(self) -> None:
        self.n_open = 0
        """Choices that run there, or did when it was lost."""
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.first_token_s = Observations(FIRST_TOKEN_S)
        self.token_gap_s = Observations(TOKEN_GAP_S)
        self.token_s = Observations(TOKEN_GAP_S)
        self.whole_s = Observations(PHASE_S)
        self.queue_s = Observations(PHASE_S)
        self.prefill_s = Observations(PHASE_S)
        self.decode_s = Observations(PHASE_S)
        self.inference_s = Observations(PHASE_S)
        self.tokens_of_prompt = Observations(TOKENS)
        self.tokens_computed = Observations(TOKENS)
        self.tokens_of_choice = Observations(TOKENS)
        self.longest_choice_tokens = Observations(TOKENS)
        self.n = Observations(PARAM_N)
        self.max_tokens = Observations(TOKENS)

    def prompt_begun(self, n_tokens: int, cached_tokens: int, params: SamplingParams) -> None:
        """The first token of a prompt's first choice came."""
        self.prompt_tokens += n_tokens
        self.cached_tokens += cached_tokens
        self.tokens_of_prompt.observe(n_tokens)
        self.n.observe(params.n)
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)

    def add(self, other: EngineTally) -> None:
        """Take over what was counted for `other`, which has no open choice."""
        self.finished.update(other.finished)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generation_tokens += other.generation_tokens
        for mine, theirs in zip(self._observations(), other._observations(), strict=True):
            mine.add(theirs)

    def _observations(self) -> list[Observations]:
        return [value for value in vars(self).values() if isinstance(value, Observations)]


class ModelTally:
    """Of all choices for one model."""

    def __init__(self) -> None:
        self.n_received = 0
        self.n_in_flight = 0
        self.engines: dict[str, EngineTally] = {}

    def engine(self, engine_id: str) -> EngineTally:
        """Choices that no engine took are under NO_ENGINE."""
        tally = self.engines.get(engine_id)
        if tally is None:
            tally = self.engines[engine_id] = EngineTally()
        return tally

    def fold_former(self, live: Container[str]) -> None:
        """Keep the newest of the engines that are not `live` and have no open choice; what was
        counted for the older ones goes to FORMER, so that no total shrinks."""
        former = [
            engine_id
            for engine_id, tally in self.engines.items()
            if engine_id not in live and engine_id not in (NO_ENGINE, FORMER) and not tally.n_open
        ]
        for engine_id in former[:-MAX_FORMER_ENGINES]:
            self.engine(FORMER).add(self.engines.pop(engine_id))

    def received(self, choices: int) -> None:
        self.n_received += choices
        self.n_in_flight += choices

    def ledger(self) -> Ledger:
        """Of choices."""
        finished: Counter[str] = Counter()
        for tally in self.engines.values():
            finished.update(tally.finished)
        return Ledger(
            received=self.n_received,
            completed=finished["stop"] + finished["length"],
            aborted=finished["abort"],
            rejected=finished["refused"],
            failed=finished["error"],
            in_flight=self.n_in_flight,
        )


class RequestMetrics:
    """By primary model name. Models are few and known, so all are kept."""

    def __init__(self) -> None:
        self.models: dict[str, ModelTally] = {}

    def of(self, model: str) -> ModelTally:
        tally = self.models.get(model)
        if tally is None:
            tally = self.models[model] = ModelTally()
        return tally

    def fold_former(self, live: Container[str]) -> None:
        """`live` are the ids of all engines that can still generate something."""
        for tally in self.models.values():
            tally.fold_former(live)

    def ledger(self) -> Ledger:
        """Of all choices."""
        return reduce(Ledger.plus, (tally.ledger() for tally in self.models.values()), Ledger())

    def tallies(self) -> Iterator[tuple[str, str, EngineTally]]:
        """(model, engine id, tally)."""
        for model, tally in self.models.items():
            for engine_id, of_engine in tally.engines.items():
                yield model, engine_id, of_engine


class ChoiceTiming:
    """When the tokens of one choice came, and to whom that counts. All times are seconds of one
    monotonic clock; what an engine says of itself are differences on its own."""

    __slots__ = (
        "_arrived_s",
        "_begun",
        "_first_s",
        "_last_s",
        "_model",
        "_tally",
        "engine_id",
        "n_tokens",
    )

    def __init__(self, model: ModelTally, arrived_s: float) -> None:
        self._model = model
        self._arrived_s = arrived_s
        self._first_s = self._last_s = arrived_s
        self._begun: Begun | None = None
        self._tally: EngineTally | None = None
        self.engine_id = NO_ENGINE
        self.n_tokens = 0

    @property
    def tally(self) -> EngineTally:
        """That of `engine_id`. NO_ENGINE is rarely needed, so it is made when something counts."""
        if self._tally is None:
            self._tally = self._model.engine(self.engine_id)
        return self._tally

    def begin(self, begun: Begun) -> None:
        """An engine has a first token. After a resume the phases of the first engine count; what
        the next ones need is part of the decoding, as after a preemption."""
        if self._begun is not None:
            self.tally.n_open -= 1
        self.engine_id, self._tally = begun.engine_id, self._model.engine(begun.engine_id)
        self._tally.n_open += 1
        if self._begun is None:
            self._begun = begun

    def gained(self, n_tokens: int, now_s: float) -> None:
        """Tokens that were merged on the way share their gap evenly."""
        if n_tokens == 0:
            return
        tally = self._tally or self.tally
        tally.generation_tokens += n_tokens
        if self.n_tokens:
            tally.token_gap_s.observe((now_s - self._last_s) / n_tokens, n_tokens)
        else:
            self._first_s = now_s
            tally.first_token_s.observe(now_s - self._arrived_s)
        self._last_s = now_s
        self.n_tokens += n_tokens

    def completed(self, now_s: float, n_prompt_tokens: int) -> None:
        """The choice ended with stop or length."""
        tally, decode_s = self.tally, self._last_s - self._first_s
        tally.whole_s.observe(now_s - self._arrived_s)
        tally.decode_s.observe(decode_s)
        tally.tokens_of_choice.observe(self.n_tokens)
        if self.n_tokens > 1:
            tally.token_s.observe(decode_s / (self.n_tokens - 1))
        if self._begun is not None:
            tally.queue_s.observe(self._begun.queue_s)
            tally.prefill_s.observe(self._begun.prefill_s)
            tally.inference_s.observe(self._begun.prefill_s + decode_s)
            tally.tokens_computed.observe(n_prompt_tokens - self._begun.cached_tokens)

    def ended(self, reason: str) -> None:
        """Whatever ended it. The last that counts."""
        tally = self.tally
        self._model.n_in_flight -= 1
        tally.finished[reason] += 1
        if self._begun is not None:
            tally.n_open -= 1
