"""Choosing one token per row: greedy, or Gumbel-max under temperature, min_p, top_k and top_p.

The three filters are one threshold on a row's scaled logits, so equal logits stay or fall together
and no result depends on the order in which a sort leaves them:
- min_p keeps tokens at least min_p times as probable as the best one;
- top_k keeps tokens no worse than the k-th best;
- top_p, on what those two left, keeps a token while the tokens strictly better than it hold less
  than the fraction top_p of the probability.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagemesh.kernels.noise import gumbel

FIRST_WINDOW: Final = 256
WINDOW_GROWTH: Final = 16


class Filters(NamedTuple):
    """Per row: top_k int64[R] (0 = off), top_p float32[R] (1 = off), min_p float32[R] (0 = off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def greedy(logits: Tensor) -> Tensor:
    """int64[R] ids of the largest of float32[R, V] logits, the lowest id among equals."""
    if logits.device.type == "cpu":
        # numpy's search is vectorised and torch's is not: four times faster over a vocabulary.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def sample(scaled: Tensor, keys: Tensor) -> Tensor:
    """int64[R] ids drawn from softmax(scaled), float32[R, V], by the noise of int64[R] keys."""
    vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return greedy(gumbel(keys, vocabulary).add_(scaled))


def sample_filtered(
    scaled: Tensor, keys: Tensor, filters: Filters, window: int = FIRST_WINDOW
) -> Tensor:
    """int64[R] ids drawn from the filtered softmax of float32[R, V] scaled logits.

    Looks at the best `window` tokens of each row; rows whose filters may keep more are looked at
    again in a larger window, up to the whole vocabulary. The window never changes the result.
    """
    window = min(window, scaled.shape[1])
    values, ids = scaled.topk(window, dim=1)
    threshold, closed = cutoff(scaled, values, filters)
    kept = values.masked_fill(values < threshold.unsqueeze(1), -torch.inf)
    best = greedy(gumbel(keys, ids.to(torch.int32)).add_(kept))
    tokens = ids.gather(1, best.unsqueeze(1)).squeeze(1)
    if not closed.all():
        rest = (~closed).nonzero().squeeze(1)
        tokens[rest] = sample_filtered(
            scaled[rest], keys[rest], filters.rows(rest), window * WINDOW_GROWTH
        )
    return tokens


def cutoff(scaled: Tensor, values: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """The smallest kept value of each row, float32[R], and whether all kept tokens are in `values`.

    `values` float32[R, W] are the W best of each row of `scaled`, best first. Where the second
    result, bool[R], is False, the first is not yet known.
    """
    window, vocab_tokens = values.shape[1], scaled.shape[1]
    top_k = filters.top_k.masked_fill(filters.top_k >= vocab_tokens, 0)
    floor = torch.maximum(_min_p_floor(values, filters.min_p), _top_k_floor(values, top_k))
    threshold = _top_p_threshold(scaled, values, floor, filters.top_p)
    last = values[:, -1]
    reached = (last < threshold) & (top_k <= window)
    return threshold, reached | last.isneginf() | (window == vocab_tokens)


def _min_p_floor(values: Tensor, min_p: Tensor) -> Tensor:
    return values[:, 0] + min_p.log()


def _top_k_floor(values: Tensor, top_k: Tensor) -> Tensor:
    kth = values.gather(1, (top_k.clamp(1, values.shape[1]) - 1).unsqueeze(1)).squeeze(1)
    return kth.masked_fill(top_k == 0, -torch.inf)


def _top_p_threshold(scaled: Tensor, values: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Sums in float64: a long tail of small probabilities would drown in float32."""
    best = values[:, :1]
    weights = (values - best).exp_().masked_fill_(values < floor.unsqueeze(1), 0.0)
    better = torch.zeros_like(weights, dtype=torch.float64)
    torch.cumsum(weights[:, :-1], dim=1, dtype=torch.float64, out=better[:, 1:])
    total = better[:, -1] + weights[:, -1]
    beyond = (top_p < 1) & (weights[:, -1] > 0)
    if values.shape[1] < scaled.shape[1] and beyond.any():
        total[beyond] = _mass_above(scaled[beyond], best[beyond], floor[beyond])
    kept = ((better < (top_p * total).unsqueeze(1)) & (weights > 0)).sum(dim=1)
    nucleus = values.gather(1, (kept - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(top_p < 1, nucleus, floor)


def _mass_above(scaled: Tensor, best: Tensor, floor: Tensor) -> Tensor:
    """float64[R]: the sum of exp(scaled - best) over each row's values of at least `floor`."""
    weights = (scaled - best).exp_().masked_fill_(scaled < floor.unsqueeze(1), 0.0)
    return weights.sum(dim=1, dtype=torch.float64)
