"""The most that a worker may be asked for, once, before requests come: it compiles every kernel and
shows the memory that steps need beside the KV pool."""

from __future__ import annotations

from typing import Final

from pagemesh.shared.engine_messages import NewRow, Step
from pagemesh.shared.errors import StartupError
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids
from pagemesh.worker_svc.runner import Runner

_BLOCK: Final = 1
_DEMANDING: Final = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=20,
    prompt_logprobs=1,
)
_PLAIN: Final = SamplingParams(temperature=1.0)


def rehearse(runner: Runner) -> None:
    """Run a full step of prompts that are scored, one of decodes with every kind of sampling, and
    one of plain decodes. All rows use the pool's one block, whose content nobody reads later.

    Raises StartupError when a step fails.
    """
    capacity, card = runner.capacity, runner.card
    longest = min(card.max_model_len, capacity.max_num_batched_tokens)
    n_prompts = min(capacity.max_num_batched_tokens // longest, capacity.max_num_seqs)
    _run(runner, [_row(runner, slot, longest, _DEMANDING) for slot in range(n_prompts)], longest)
    for params in (_DEMANDING, _PLAIN):
        rows = [_row(runner, slot, 2, params) for slot in range(capacity.max_num_seqs)]
        _run(runner, rows, 1)
    runner.reset()


def _row(runner: Runner, slot: int, n_tokens: int, params: SamplingParams) -> NewRow:
    """A request of which all tokens are still to be computed, or all but the last."""
    n_blocks = -(-n_tokens // runner.card.block_tokens)
    computed = n_tokens - 1 if n_tokens == 2 else 0
    return NewRow(
        slot=slot,
        ids=pack_ids([0] * n_tokens),
        n_prompt=n_tokens,
        seed=slot,
        params=params,
        blocks=pack_ids([_BLOCK] * n_blocks),
        computed=computed,
    )


def _run(runner: Runner, rows: list[NewRow], n_tokens: int) -> None:
    chunks = [word for row in rows for word in (row.slot, n_tokens)]
    n_rows = len(rows)
    result = runner.execute(
        Step(0, 1, 0, n_rows, n_rows * n_tokens, new=rows, chunks=pack_ids(chunks))
    )
    if result.failed:
        raise StartupError(
            f"a full step of {n_rows * n_tokens} tokens cannot be computed "
            f"({result.failed[0][1]}): lower --max-num-batched-tokens or --max-num-seqs"
        )
