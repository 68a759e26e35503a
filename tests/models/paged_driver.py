"""Drives a decoder the way a runner does: packed mixed batches over scattered pages."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.models.cpu_decoder import CPUDecoder
from pagemesh.worker_svc.models.decoder import Decoder


class PagedDriver:
    """Keeps pages and lengths of named sequences."""

    def __init__(
        self,
        decoder: Decoder | CPUDecoder,
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the KV pool."""
        config = decoder.config
        self.decoder = decoder
        self.block_tokens = block_tokens
        self.kv = KVCache(config, num_blocks, block_tokens, dtype, "cpu")
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(self, work: dict[str, list[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of each sequence; returns their logits [n, vocab] by name."""
        names = _in_order(work)
        logits = self.decoder.logits(self._forward(names, work)).clone()
        return _by_name(names, work, logits)

    def hidden(self, work: dict[str, list[int]]) -> dict[str, Tensor]:
        """The same of the final hidden states [n, H]."""
        names = _in_order(work)
        return _by_name(names, work, self._forward(names, work).clone())

    def _forward(self, names: list[str], work: dict[str, list[int]]) -> Tensor:
        positions = {name: self._extend(name, len(work[name])) for name in names}
        return self.decoder.forward(
            torch.tensor([token for name in names for token in work[name]]),
            torch.tensor([p for name in names for p in positions[name]]),
            self._inputs(names, work, positions),
            self.kv,
        )

    def fork(self, name: str, child: str) -> tuple[list[int], list[int]]:
        """Give `child` as many blocks as `name` has; returns both tables, to be copied."""
        self._lens[child] = self._lens[name]
        self._tables[child] = [self._free.pop() for _ in self._tables[name]]
        return self._tables[name], self._tables[child]

    def _extend(self, name: str, n: int) -> range:
        start = self._lens.get(name, 0)
        self._lens[name] = start + n
        table = self._tables.setdefault(name, [])
        while len(table) * self.block_tokens < start + n:
            table.append(self._free.pop())
        return range(start, start + n)

    def _inputs(
        self, names: list[str], work: dict[str, list[int]], positions: dict[str, range]
    ) -> AttentionInputs:
        tables = [self._tables[name] for name in names]
        width = max(map(len, tables))
        counts = [len(work[name]) for name in names]
        lens = [self._lens[name] for name in names]
        return AttentionInputs(
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(
                [
                    self._tables[name][p // self.block_tokens] * self.block_tokens
                    + p % self.block_tokens
                    for name in names
                    for p in positions[name]
                ]
            ),
            max_query_tokens=max(counts),
            max_seq_tokens=max(lens),
            n_decode=sum(count == 1 for count in counts),
        )


def _in_order(work: dict[str, list[int]]) -> list[str]:
    """Decode rows come first."""
    return sorted(work, key=lambda name: len(work[name]) > 1)


def _by_name(names: list[str], work: dict[str, list[int]], rows: Tensor) -> dict[str, Tensor]:
    return dict(zip(names, rows.split([len(work[name]) for name in names]), strict=True))
