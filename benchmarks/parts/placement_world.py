"""A mesh on a virtual clock: the real dispatch code, told late; workers are a few numbers each.

Conversations come and go; each turn's prompt is a system prompt, what was said before and something
new. Several dispatchers place the turns by the engines' last reports and by what they placed
themselves, as tokenizer services do. No I/O; the only real time is that of the decisions.
"""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from pagemesh.shared.messages import Capacity, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.step_stats import StepPace
from pagemesh.tokenizer_svc.dispatch import Ask, Chosen, Dispatch, Need, Place

BLOCK_TOKENS: Final = 16
CARD: Final = ModelCard(["m"], 32_000, 32_768, BLOCK_TOKENS, "bfloat16", [2], 1, "f", 0)
PACE: Final = StepPace(overhead_s=0.012, token_s=0.00003)
STEP_TOKENS: Final = 8192
REPORT_S: Final = 0.2
LINK_S: Final = 0.001
INDEX_S: Final = 0.06
"""From a block's computation to its place in the index: schedulers publish every 50 ms."""
THINK_S: Final = 4.0
TURNS: Final = 8
SYSTEM_BLOCKS: Final = 32
TURN_BLOCKS: Final = 6
ANSWER_TOKENS: Final = 128
SAMPLE_S: Final = 0.1


class Shape(NamedTuple):
    """How many of each, rows of a worker's batch, and conversations that go on at a time."""

    workers: int
    rows: int
    schedulers: int
    dispatchers: int
    conversations: int
    system_prompts: int
    blocks: int
    """Of a worker's cache."""


class Conversation:
    """Owner of the chain of its prompt's blocks; a chain's hash is its place in it."""

    def __init__(self, number: int, system: int) -> None:
        self.turns = 0
        self._name = number.to_bytes(8, "little")
        self._chain = [b"s" + bytes((system, index)) for index in range(SYSTEM_BLOCKS)]

    def ask(self) -> Ask:
        """The next turn's."""
        self.turns += 1
        begin = len(self._chain)
        self._chain += [
            self._name + index.to_bytes(2, "little") for index in range(begin, begin + TURN_BLOCKS)
        ]
        tokens = len(self._chain) * BLOCK_TOKENS + BLOCK_TOKENS // 2
        return Ask(
            Need(BLOCK_TOKENS, tokens + ANSWER_TOKENS, CARD.variant),
            tokens,
            tuple(self._chain),
            ANSWER_TOKENS,
            affinity=self._chain[0],
        )


class Turn(NamedTuple):
    """One request, and the dispatcher that placed it."""

    key: int
    ask: Ask
    said: Conversation
    dispatch: Dispatch
    arrived_s: float


class Engine:
    """A worker and its scheduler's books: rows, a queue, prompts one after the other, a cache."""

    def __init__(self, number: int, shape: Shape) -> None:
        self.number = number
        self.name = f"engine-{number:04}"
        self.running = 0
        self.waiting: deque[Turn] = deque()
        self.prefill_tokens = 0.0
        self.capacity = Capacity(shape.blocks, shape.rows, STEP_TOKENS, 1024, "simulated")
        self._free_s = 0.0
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    @property
    def load(self) -> float:
        """Requests for each row."""
        return (self.running + len(self.waiting)) / self.capacity.max_num_seqs

    def status(self) -> EngineStatus:
        stats = EngineStats(
            running=self.running,
            waiting=len(self.waiting),
            prefill_tokens=round(self.prefill_tokens),
            pace=PACE,
            index_number=self.number + 1,
        )
        return EngineStatus(self.name, CARD, self.capacity, stats)

    def cached_blocks(self, chain: Sequence[bytes]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self._cache), len(chain))

    def remember(self, chain: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Blocks that are new in the cache, and those that went for them."""
        new = [block for block in chain if block not in self._cache]
        for block in reversed(chain):
            self._cache[block] = None
            self._cache.move_to_end(block)
        over = len(self._cache) - self.capacity.num_blocks
        return new, [self._cache.popitem(last=False)[0] for _ in range(max(0, over))]

    def begin(self, uncached_tokens: float, now_s: float) -> tuple[float, float]:
        """When the prompt is computed, and when the answer ends, if it begins now."""
        self.running += 1
        step_s = PACE.overhead_s + self.running * PACE.token_s
        share = STEP_TOKENS / max(1, STEP_TOKENS - self.running)
        self._free_s = max(now_s, self._free_s) + uncached_tokens * PACE.token_s * share
        return self._free_s + step_s, self._free_s + ANSWER_TOKENS * step_s


class Index:
    """The prefix index, if Redis answers: which engines hold which blocks."""

    def __init__(self) -> None:
        self._holders: defaultdict[bytes, set[int]] = defaultdict(set)

    def change(self, number: int, new: Sequence[bytes], gone: Sequence[bytes]) -> None:
        for block in new:
            self._holders[block].add(number)
        for block in gone:
            self._holders[block].discard(number)

    def depths(self, chain: Sequence[bytes]) -> dict[int, int]:
        depths: dict[int, int] = {}
        left: set[int] | None = None
        for depth, block in enumerate(chain, 1):
            held = self._holders.get(block, set())
            left = set(held) if left is None else left & held
            if not left:
                break
            depths.update(dict.fromkeys(left, depth))
        return depths


class Figures:
    """What is measured."""

    def __init__(self) -> None:
        self.decision_s: list[float] = []
        self.update_s: list[float] = []
        self.loads: list[tuple[float, float, float, float]] = []
        self.queued_s: list[float] = []
        self.first_token_s: list[float] = []
        self.hit_tokens = self.prompt_tokens = 0
        self.burst = 0
        """Most turns placed on one engine between two reports of it."""


Policy = Callable[["World", Dispatch, Ask], Chosen]


def cheapest(world: World, dispatch: Dispatch, ask: Ask) -> Chosen:
    """The real one, with what the index says."""
    chosen = dispatch.choose(ask, world.index.depths(ask.hashes), world.now_s)
    assert chosen is not None
    return chosen


def without_index(world: World, dispatch: Dispatch, ask: Ask) -> Chosen:
    chosen = dispatch.choose(ask, None, world.now_s)
    assert chosen is not None
    return chosen


def in_turn(world: World, dispatch: Dispatch, ask: Ask) -> Chosen:
    """Round robin, to compare with."""
    engine = world.engines[next(world.turns) % len(world.engines)]
    return Chosen(Place(world.scheduler_of(engine), engine.name), 0)


class World:
    """Events by time. `run` plays them."""

    def __init__(self, shape: Shape, policy: Policy, seed: int = 0) -> None:
        self.shape = shape
        self.now_s = 0.0
        self.turns = count()
        self.index = Index()
        self.engines = [Engine(number, shape) for number in range(shape.workers)]
        self.figures = Figures()
        self._policy = policy
        self._random = random.Random(seed)
        self._by_name = {engine.name: engine for engine in self.engines}
        self._dispatchers = [Dispatch() for _ in range(shape.dispatchers)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._keys = count()
        self._conversations = count()
        self._placed_since: Counter[str] = Counter()
        self._measuring = False

    def scheduler_of(self, engine: Engine) -> str:
        return f"scheduler-{engine.number % self.shape.schedulers}"

    def run(self, warm_up_s: float, measured_s: float) -> Figures:
        for number in range(self.shape.schedulers):
            self._report(number, first=True)
            self._after(self._random.uniform(0, REPORT_S), partial(self._report, number))
        for _ in range(self.shape.conversations):
            self._after(self._random.uniform(0, THINK_S), self._converse)
        self._after(SAMPLE_S, self._sample)
        self._play(warm_up_s)
        self._measuring = True
        self._play(warm_up_s + measured_s)
        return self.figures

    def _after(self, delay_s: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + delay_s, next(self._order), happens))

    def _play(self, until_s: float) -> None:
        while self._events[0][0] <= until_s:
            self.now_s, _, happens = heappop(self._events)
            happens()

    # -- turns -------------------------------------------------------------------------------------

    def _converse(self) -> None:
        number = next(self._conversations)
        system = self._random.randrange(self.shape.system_prompts)
        self._speak(Conversation(number, system))

    def _speak(self, said: Conversation) -> None:
        dispatch = self._random.choice(self._dispatchers)
        turn = Turn(next(self._keys), said.ask(), said, dispatch, self.now_s)
        began_s = time.perf_counter()
        chosen = self._policy(self, dispatch, turn.ask)
        dispatch.place([turn.key], turn.ask, chosen, self.now_s)
        self._note(self.figures.decision_s, time.perf_counter() - began_s)
        name = chosen.place.engine_id
        self._placed_since[name] += 1
        self._after(LINK_S, lambda: self._enter(self._by_name[name], turn))

    def _enter(self, engine: Engine, turn: Turn) -> None:
        engine.prefill_tokens += turn.ask.known_tokens
        engine.waiting.append(turn)
        self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        while engine.waiting and engine.running < engine.capacity.max_num_seqs:
            self._start(engine, engine.waiting.popleft())

    def _start(self, engine: Engine, turn: Turn) -> None:
        cached = engine.cached_blocks(turn.ask.hashes)
        uncached_tokens = turn.ask.uncached_tokens(cached)
        engine.prefill_tokens -= turn.ask.known_tokens - uncached_tokens
        first_s, end_s = engine.begin(uncached_tokens, self.now_s)
        self._count(turn, cached, first_s)
        changes = engine.remember(turn.ask.hashes)
        self._at(first_s, lambda: self._computed(engine, turn, uncached_tokens))
        self._at(first_s + INDEX_S, lambda: self.index.change(engine.number + 1, *changes))
        self._at(end_s, lambda: self._end(engine, turn))

    def _at(self, at_s: float, happens: Callable[[], None]) -> None:
        self._after(at_s - self.now_s, happens)

    def _computed(self, engine: Engine, turn: Turn, tokens: float) -> None:
        engine.prefill_tokens -= tokens
        turn.dispatch.begun([turn.key])

    def _end(self, engine: Engine, turn: Turn) -> None:
        engine.running -= 1
        turn.dispatch.release([turn.key])
        self._admit(engine)
        think_s = self._random.expovariate(1 / THINK_S)
        if turn.said.turns >= TURNS:
            self._after(think_s, self._converse)
        else:
            self._after(think_s, lambda: self._speak(turn.said))

    # -- reports and figures -----------------------------------------------------------------------

    def _report(self, number: int, *, first: bool = False) -> None:
        engines = self.engines[number :: self.shape.schedulers]
        statuses = [engine.status() for engine in engines]
        for engine in engines:
            placed = self._placed_since.pop(engine.name, 0)
            self.figures.burst = max(self.figures.burst, placed if self._measuring else 0)
        if first:
            self._learn(number, statuses)
        else:
            self._after(LINK_S, lambda: self._learn(number, statuses))
            self._after(REPORT_S, lambda: self._report(number))

    def _learn(self, number: int, statuses: list[EngineStatus]) -> None:
        for dispatch in self._dispatchers:
            began_s = time.perf_counter()
            dispatch.update(f"scheduler-{number}", statuses)
            self._note(self.figures.update_s, time.perf_counter() - began_s)

    def _count(self, turn: Turn, cached: int, first_s: float) -> None:
        if self._measuring:
            self.figures.hit_tokens += cached * BLOCK_TOKENS
            self.figures.prompt_tokens += turn.ask.known_tokens
            self.figures.queued_s.append(self.now_s - turn.arrived_s)
            self.figures.first_token_s.append(first_s - turn.arrived_s)

    def _sample(self) -> None:
        loads = sorted(engine.load for engine in self.engines)
        if self._measuring:
            n = len(loads)
            self.figures.loads.append((sum(loads) / n, loads[0], loads[n * 99 // 100], loads[-1]))
        self._after(SAMPLE_S, self._sample)

    def _note(self, figures: list[float], value: float) -> None:
        if self._measuring:
            figures.append(value)
