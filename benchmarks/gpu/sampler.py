"""The sampler on a card: microseconds of a step's sampling, beside one of torch that sorts.

    python benchmarks/gpu/sampler.py --compile-only   # fills Triton's cache from several processes
    python benchmarks/gpu/sampler.py                  # correctness, then the table
    python benchmarks/gpu/sampler.py --sweep          # shapes of the draw's programs

Logits are bfloat16, as a model leaves them. "peaked" ones fall with the logarithm of a token's
rank, as in text; "flat" ones are normal, as random weights give them: there top_p keeps most of the
vocabulary. Launches are timed as replays of a CUDA graph, torch's without one. The logits of many
rows together exceed the L2 cache; those of few are found in it, as behind the layer that wrote
them. The percentage is of the time in which a copy would read the logits once.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context

import numpy as np
import torch
from parts.card_clock import copy_bytes_s, event_us, launch_us
from torch import Tensor

from pagemesh.kernels import sample_rows as reference
from pagemesh.kernels.gpu.filters import SearchConfig, survey, thresholds
from pagemesh.kernels.gpu.logprobs import token_logprobs
from pagemesh.kernels.gpu.row_params import SamplingRows
from pagemesh.kernels.gpu.sampling import SampleConfig, SampledTokens, sample_rows
from pagemesh.kernels.logprobs import token_logprobs as reference_logprobs
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.gpu.sampling_state import row_words
from pagemesh.worker_svc.sampling_state import row_params

DEVICE = "cuda"
VOCABULARIES = [151936, 128256]
ROWS = [1, 8, 64, 256]
ROW_TOKENS = 64
COLD_BYTES = 250e6
MAX_SETS = 32
CHECKED_ROWS = 28
MAX_LOGPROB_ERROR = 1e-4

WORK = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}
SWEPT = [
    SampleConfig(*pair)
    for pair in ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
]
SEARCHES = [
    SearchConfig(*sizes)
    for sizes in ((64, 64, 8), (64, 128, 8), (128, 128, 8), (64, 256, 16), (128, 256, 16))
]


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def random_logits(n_rows: int, vocab_tokens: int, shape: str) -> Tensor:
    noise = torch.randn(n_rows, vocab_tokens, device=DEVICE)
    if shape == "flat":
        return noise.to(torch.bfloat16)
    ranks = noise.argsort(dim=1).argsort(dim=1)
    return (-1.5 * (1 + ranks.float()).log() + 0.1 * noise).to(torch.bfloat16)


@dataclass(frozen=True)
class Batch:
    """Logits and where their samples go."""

    logits: Tensor
    rows: SamplingRows
    out: SampledTokens
    params: list[SamplingParams]

    @classmethod
    def of(cls, logits: Tensor, params: list[SamplingParams]) -> Batch:
        n_rows = len(logits)
        words = np.stack([row_words(own, seed) for seed, own in enumerate(params)])
        numbers = torch.arange(n_rows, dtype=torch.int32, device=DEVICE)
        result, token_ids = (
            torch.full(size, -7, dtype=torch.int32, device=DEVICE)
            for size in ((2, n_rows), (n_rows, ROW_TOKENS))
        )
        rows = SamplingRows(torch.from_numpy(words).to(DEVICE), numbers, numbers % ROW_TOKENS)
        return cls(logits, rows, SampledTokens(result, token_ids), params)

    def sample(self, config: SampleConfig | None = None) -> None:
        filtered = any(map(is_filtered, self.params))
        sample_rows(self.logits, self.rows, self.out, filtered=filtered, config=config)
        if (top := self.params[0].logprobs) is not None:
            token_logprobs(self.logits, self.rows.slots, self.out.result[0], top)

    def sample_with_torch(self) -> Tensor:
        """All rows alike. Sorts where rows filter."""
        params = self.params[0]
        logits = self.logits.float()
        if params.is_greedy:
            tokens = logits.argmax(dim=1)
            if params.logprobs is not None:
                logits.log_softmax(dim=1).topk(params.logprobs, dim=1)
            return tokens
        logits = _filter_with_torch(logits / params.temperature, params)
        noise = torch.empty_like(logits).exponential_()
        return logits.softmax(dim=1).div_(noise).argmax(dim=1)


def _filter_with_torch(logits: Tensor, params: SamplingParams) -> Tensor:
    if params.min_p > 0:
        probabilities = logits.softmax(dim=1)
        least = params.min_p * probabilities.amax(dim=1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    if params.top_k > 0 or params.top_p < 1:
        ordered, order = logits.sort(dim=1)
        if params.top_k > 0:
            kth = ordered[:, -params.top_k].unsqueeze(1)
            ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        if params.top_p < 1:
            up_to = ordered.softmax(dim=1).cumsum(dim=1)
            dropped = up_to <= 1 - params.top_p
            dropped[:, -1] = False
            ordered = ordered.masked_fill(dropped, -torch.inf)
        logits = torch.empty_like(logits).scatter_(1, order, ordered)
    return logits


# -- correctness ----------------------------------------------------------------------------------


def check(vocab_tokens: int, shape: str) -> None:
    """Rows of all kinds in one batch against the reference on the host."""
    ways = [params for params in WORK.values() if params.logprobs is None]
    params = [ways[row % len(ways)] for row in range(CHECKED_ROWS)]
    batch = Batch.of(random_logits(CHECKED_ROWS, vocab_tokens, shape), params)
    batch.sample()
    expected = expected_tokens(batch)
    same = int((batch.out.result[0].cpu() == expected).sum())
    if same < CHECKED_ROWS or not batch.out.result[1].all():
        raise SystemExit(f"{vocab_tokens} {shape}: {same} of {CHECKED_ROWS} tokens are right")
    error = logprobs_error(batch.logits, batch.out.result[0])
    if not error < MAX_LOGPROB_ERROR:
        raise SystemExit(f"{vocab_tokens} {shape}: logprobs differ by {error:.1e}")
    print(f"{vocab_tokens} {shape}: {same} tokens as the reference's, logprobs within {error:.1e}")


def expected_tokens(batch: Batch) -> Tensor:
    """int64[R] of the reference, where no row is penalised."""
    n_rows, vocab_tokens = batch.logits.shape
    none, counts = np.empty(0, np.int64), torch.zeros((0, vocab_tokens), dtype=torch.bool)
    tokens, _ = reference.sample_rows(
        batch.logits.float().cpu(),
        reference.SamplingInputs(
            np.stack([row_params(own, seed) for seed, own in enumerate(batch.params)]),
            batch.rows.positions.cpu().numpy().astype(np.int64),
            reference.Edits(np.zeros(n_rows + 1, np.int64), none, none.astype(np.float32)),
            counts,
            counts.to(torch.int32),
        ),
    )
    return tokens


def logprobs_error(logits: Tensor, chosen: Tensor) -> float:
    """The largest difference to the reference; infinite if a rank differs."""
    rows, wide = torch.arange(len(logits)), logits.float().cpu()
    (_, mine, ranks), _ = token_logprobs(logits, rows.to(DEVICE), chosen, 5)
    (_, theirs, expected_ranks), _ = reference_logprobs(wide, rows, chosen.long().cpu(), 5)
    if not torch.equal(ranks.cpu(), expected_ranks):
        return float("inf")
    return float((mine.cpu() - theirs).abs().max())


# -- timing ---------------------------------------------------------------------------------------


def eager_us(launches: list[Callable[[], object]]) -> float:
    """Mean microseconds of a call after the first ones, as an engine without graphs would see."""
    launches[0]()
    return event_us(lambda: [launch() for launch in launches]) / len(launches)


def batches(logits: list[Tensor], params: SamplingParams) -> list[Batch]:
    return [Batch.of(each, [params] * len(each)) for each in logits]


def logits_sets(n_rows: int, vocab_tokens: int, shape: str) -> list[Tensor]:
    first = random_logits(n_rows, vocab_tokens, shape)
    sets = min(MAX_SETS, int(COLD_BYTES // first.nbytes) + 1)
    return [first, *(first.roll(turn, dims=1) for turn in range(1, sets))]


def print_table(copy: float) -> None:
    columns = "".join(f"{n_rows:>7} rows  (%)   torch" for n_rows in ROWS)
    print(f"\n{'us':35}{columns}")
    for vocab_tokens, shape in product(VOCABULARIES, ("peaked", "flat")):
        sets = {n_rows: logits_sets(n_rows, vocab_tokens, shape) for n_rows in ROWS}
        for name, params in WORK.items():
            cells = (cell(batches(logits, params), copy) for logits in sets.values())
            print(f"{vocab_tokens} {shape:7}{name:21}", *cells, flush=True)


def cell(sets: list[Batch], copy: float) -> str:
    us = launch_us([batch.sample for batch in sets])
    with_torch = eager_us([batch.sample_with_torch for batch in sets[:4]])
    percent = 100 * sets[0].logits.nbytes / copy / (us * 1e-6)
    return f"{us:11.1f} ({percent:3.0f}) {with_torch:7.0f}"


def sweep_searches() -> None:
    vocab_tokens = VOCABULARIES[0]
    print(f"\n{'us of the search':36}" + "".join(f"{n_rows:>10}" for n_rows in ROWS))
    for shape, name in product(("peaked", "flat"), ("top_k 50", "top_p 0.9")):
        sets = [batches(logits_sets(n, vocab_tokens, shape), WORK[name]) for n in ROWS]
        found = [[survey(b.logits, b.rows, edited=False) for b in each] for each in sets]
        for config in SEARCHES:
            times = (
                launch_us(
                    [
                        partial(thresholds, b.logits, b.rows, of_b, config)
                        for b, of_b in zip(each, surveys, strict=True)
                    ]
                )
                for each, surveys in zip(sets, found, strict=True)
            )
            label = f"{shape} {name} {config.near_groups} {config.far_groups} {config.num_warps}"
            print(f"{label:36}" + "".join(f"{us:10.1f}" for us in times), flush=True)


def sweep_draws() -> None:
    vocab_tokens = VOCABULARIES[0]
    print(f"\n{'us, slice and warps':24}" + "".join(f"{n_rows:>10}" for n_rows in ROWS))
    for shape, name in product(("peaked", "flat"), ("greedy", "temperature")):
        sets = [batches(logits_sets(n, vocab_tokens, shape), WORK[name]) for n in ROWS]
        for config in SWEPT:
            times = (launch_us([partial(b.sample, config) for b in each]) for each in sets)
            label = f"{shape} {name} {config.slice_tokens} {config.num_warps}"
            print(f"{label:28}" + "".join(f"{us:10.1f}" for us in times), flush=True)


# -- compilation ----------------------------------------------------------------------------------

Variant = tuple[int, str, SampleConfig | SearchConfig | int]


def variants(swept: bool) -> Iterable[Variant]:
    """Each vocabulary and way, at few rows and at many, or with a configuration."""
    yield from product(VOCABULARIES, ("temperature", "top_p 0.9", "greedy, logprobs 5"), (1, 16))
    if swept:
        yield from product(VOCABULARIES[:1], ("temperature",), SWEPT)
        yield from product(VOCABULARIES[:1], ("top_p 0.9",), SEARCHES)


def compile_one(variant: Variant) -> None:
    vocab_tokens, name, choice = variant
    n_rows = choice if isinstance(choice, int) else 1
    [batch] = batches([random_logits(n_rows, vocab_tokens, "flat")], WORK[name])
    if isinstance(choice, SearchConfig):
        found = survey(batch.logits, batch.rows, edited=False)
        thresholds(batch.logits, batch.rows, found, choice)
    else:
        batch.sample(choice if isinstance(choice, SampleConfig) else None)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    if args.compile_only:
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as executor:
            list(executor.map(compile_one, variants(args.sweep)))
        return
    torch.manual_seed(0)
    gc.freeze()
    for vocab_tokens, shape in product(VOCABULARIES, ("peaked", "flat")):
        check(vocab_tokens, shape)
    if args.sweep:
        sweep_draws()
        sweep_searches()
        return
    copy = copy_bytes_s()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s")
    print_table(copy)


if __name__ == "__main__":
    main()
