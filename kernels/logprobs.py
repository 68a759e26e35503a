"""Log-probabilities of chosen tokens and of the best alternatives, from raw logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.search import clear_nonfinite, count_above


class Logprobs(NamedTuple):
    """Per row: ids int32[R, 1 + k] and logprobs float32[R, 1 + k], the chosen token first and then
    the k most probable, best first; rank int32[R] of the chosen token, 1 for the best."""

    ids: Tensor
    values: Tensor
    ranks: Tensor


def token_logprobs(
    logits: Tensor, rows: Tensor, chosen: Tensor, top: int
) -> tuple[Logprobs, NDArray[np.bool_]]:
    """Logprobs of int64[R] `chosen` tokens under the rows int64[R] of float32[N, V] logits, and
    bool[R] whether those are finite; rows that are not count as zeros.

    Subtracts the log-sum-exp from the few logits wanted, so no row of log-softmax is stored. The
    rank counts strictly better tokens: among equals all have the best rank.
    """
    logits = logits[rows]
    finite = clear_nonfinite(logits)
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    chosen_logits = logits.gather(1, chosen.unsqueeze(1))
    best = logits.topk(min(top, logits.shape[1]), dim=1)
    ids = torch.cat((chosen.unsqueeze(1), best.indices), dim=1).to(torch.int32)
    values = torch.cat((chosen_logits, best.values), dim=1) - normaliser
    ranks = count_above(logits, chosen_logits.squeeze(1)).to(torch.int32) + 1
    return Logprobs(ids, values, ranks), finite


def with_tokens(logprobs: Logprobs, logits: Tensor, rows: Tensor, wanted: Tensor) -> Logprobs:
    """`logprobs`, those of the rows int64[R] of [N, V] logits, with a column for each of the
    `wanted` tokens int64[R, M] behind the others."""
    chosen, values = logprobs.ids[:, 0].to(torch.int64), logprobs.values
    normaliser = logits[rows, chosen].to(torch.float32) - values[:, 0]
    more = logits[rows.unsqueeze(1), wanted].to(torch.float32) - normaliser.unsqueeze(1)
    ids = torch.cat((logprobs.ids, wanted.to(torch.int32)), dim=1)
    return Logprobs(ids, torch.cat((values, more), dim=1), logprobs.ranks)
