"""`pagemesh bench serve`: drive an OpenAI-style server and measure what its clients see."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import uvloop
from tqdm import tqdm

from pagemesh.bench.arrivals import arrival_times_s
from pagemesh.bench.client import (
    ClientSaturated,
    Job,
    ShareResult,
    Target,
    open_session,
    stream_one,
)
from pagemesh.bench.datasets import (
    BenchRequest,
    PrefixShape,
    RandomShape,
    Wording,
    as_messages,
    as_text,
    as_token_ids,
    file_requests,
    random_requests,
    shared_prefix_requests,
)
from pagemesh.bench.options import ServeOptions
from pagemesh.bench.processes import most_clients, run_shares, split
from pagemesh.bench.report import Report
from pagemesh.bench.statistics import merged_load, summarize
from pagemesh.bench.target import Server, explore
from pagemesh.shared.errors import SettingsError, StartupError

# Short, and of a seed that no dataset uses, so that nothing measured is cached by them.
_WARMUP_SHAPE: Final = RandomShape(input_len=32, output_len=8)
_WARMUP_SEED: Final = -1
_SEEDS_PER_START: Final = 1_000_003


class _Run(NamedTuple):
    """`options` are those of the start that counts: another start draws from another seed."""

    options: ServeOptions
    server: Server
    results: list[ShareResult]
    n_restarts: int


def bench_serve(options: ServeOptions) -> Report:
    """Run the benchmark. Raises StartupError when the server cannot be used at all."""
    _check(options)
    run = _run_with_enough_clients(options)
    records = [record for result in run.results for record in result.records]
    is_file = options.dataset_name == "file"
    return Report(
        setup=_setup(run.options, run.server),
        summary=summarize(records, options.goodput),
        load=merged_load(result.load for result in run.results),
        n_clients=len(run.results),
        refused_ids=None if is_file else run.server.refused_ids,
        fixed_lengths=options.ignore_eos,
        n_restarts=run.n_restarts,
        resent=is_file,
    )


def _run_with_enough_clients(options: ServeOptions) -> _Run:
    """Start over with twice the processes while they are the limit and there are cores for more.

    A run under way cannot be helped: what its clients saw late stays in its figures.
    """
    n_restarts = 0
    while True:
        try:
            return _start(options, n_restarts)
        except ClientSaturated:
            n_restarts += 1
            tqdm.write("The client is the limit: again with more processes.", sys.stderr)


def _start(options: ServeOptions, n_restarts: int) -> _Run:
    server = uvloop.run(_warmed_up(options))
    options = _redrawn(options, n_restarts)
    jobs = _jobs(options, server)
    most = most_clients(len(jobs), options.max_concurrency)
    n_clients = min(2**n_restarts, most) if options.clients == "auto" else options.clients
    shares = split(
        _target(options, server.url),
        jobs,
        options.max_concurrency,
        n_clients,
        give_up=options.clients == "auto" and n_clients < most,
    )
    with _quiet_collector(), tqdm(total=len(jobs), unit="req") as bar:
        return _Run(options, server, run_shares(shares, lambda: _advance(bar)), n_restarts)


def _redrawn(options: ServeOptions, n_restarts: int) -> ServeOptions:
    """Other random prompts for another start, so that no cache knows them."""
    return replace(options, seed=options.seed + n_restarts * _SEEDS_PER_START)


def draw_requests(options: ServeOptions, server: Server) -> list[BenchRequest]:
    """The requests that `options` ask for. Raises StartupError for a file that will not do."""
    if options.dataset_path is not None:
        return file_requests(
            options.dataset_path,
            options.num_prompts,
            max_tokens=options.file_output_len,
            endpoint=options.endpoint,
        )
    n_requests, wording = options.num_prompts, _wording(options, server)
    vocab, seed = server.vocab_tokens, options.seed
    if options.dataset_name == "random":
        shape = _random_shape(options)
        return random_requests(n_requests, shape, vocab_tokens=vocab, seed=seed, wording=wording)
    prefixes = _prefix_shape(options)
    return shared_prefix_requests(
        n_requests, prefixes, vocab_tokens=vocab, seed=seed, wording=wording
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No pauses for what is already there: the requests, encoded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _advance(bar: tqdm[NoReturn]) -> None:
    bar.update()


def _check(options: ServeOptions) -> None:
    if (options.dataset_name == "file") != (options.dataset_path is not None):
        raise SettingsError(
            "--dataset-name file and --dataset-path go together", key="dataset_path"
        )


async def _warmed_up(options: ServeOptions) -> Server:
    """Find out what the server is, and let it answer once or more before it is measured."""
    async with open_session(_target(options, options.base_url)) as session:
        server = await explore(
            session,
            options.base_url,
            options.endpoint,
            model=options.model,
            vocab_tokens=options.vocab_size,
        )
        requests = random_requests(
            options.num_warmups,
            _WARMUP_SHAPE,
            vocab_tokens=server.vocab_tokens,
            seed=_WARMUP_SEED,
            wording=_wording(options, server),
        )
        for index, request in enumerate(requests):
            record = await stream_one(session, server.url, _job(options, server, index, request))
            if record.failure is not None:
                kind, message = record.failure
                raise StartupError(f"the warm-up request to {server.url} failed: {kind}: {message}")
    return server


def _target(options: ServeOptions, url: str) -> Target:
    headers = {"Content-Type": "application/json"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    return Target(url, headers, options.request_timeout_s)


def _wording(options: ServeOptions, server: Server) -> Wording:
    if options.endpoint == "chat":
        return as_messages
    return as_token_ids if server.refused_ids is None else as_text


def _random_shape(options: ServeOptions) -> RandomShape:
    return RandomShape(
        options.random_input_len, options.random_output_len, options.random_range_ratio
    )


def _prefix_shape(options: ServeOptions) -> PrefixShape:
    return PrefixShape(
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
        options.prefix_repetition_num_prefixes,
        options.prefix_repetition_output_len,
    )


def _jobs(options: ServeOptions, server: Server) -> list[Job]:
    requests = draw_requests(options, server)
    arrivals = arrival_times_s(len(requests), options.request_rate, options.seed)
    return [
        _job(options, server, index, request, arrival_s)
        for index, (request, arrival_s) in enumerate(zip(requests, arrivals, strict=True))
    ]


def _job(
    options: ServeOptions, server: Server, index: int, request: BenchRequest, arrival_s: float = 0.0
) -> Job:
    body: dict[str, Any] = {
        "model": server.model,
        "messages" if options.endpoint == "chat" else "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    encoded = msgspec.json.encode(body | options.extra_body)
    return Job(index, arrival_s, encoded, request.max_tokens, request.prompt_tokens)


def _setup(options: ServeOptions, server: Server) -> dict[str, Any]:
    """Every option but the key, as JSON can hold it."""
    given = asdict(options) | {"model": server.model, "vocab_size": server.vocab_tokens}
    del given["api_key"], given["json"]
    given["dataset_path"] = str(options.dataset_path) if options.dataset_path else None
    given["request_rate"] = str(options.request_rate)
    return given
