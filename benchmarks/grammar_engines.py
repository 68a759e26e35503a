"""What following a rule costs the host, by llguidance as pagemesh uses it and by xgrammar.

    python benchmarks/grammar_engines.py FOLDER [--rows 16] [--tokens 128]

FOLDER is a prepared model: its tokenizer.json is the vocabulary. xgrammar is measured if it is
installed (pip install xgrammar), on the same rules and vocabulary. For each rule: the first time it
comes and every next one, until the first mask is there; then taking a token and making the next
mask, drawn at random from what the mask allows. Times in microseconds, one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from structured_outputs import PERSON

from pagemesh.shared.grammar import TOKENIZER_FILE, CompiledRules, GrammarVocabulary
from pagemesh.shared.prepared import load_prepared
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.worker_svc.grammar_masks import fill_masks, mask_words

NESTED: Final = {
    "type": "object",
    "properties": {
        "people": {"type": "array", "items": PERSON},
        "address": {"type": "object", "properties": {"zip": {"type": "string", "maxLength": 9}}},
        "kind": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 70}, {"type": "null"}]},
    },
    "required": ["people", "address", "kind"],
    "additionalProperties": False,
}
RULES: Final[dict[str, dict[str, Any]]] = {
    "flat schema": {"json": PERSON},
    "nested schema": {"json": NESTED},
    "regular expression": {"regex": "([a-z]+ )*[0-9]{4}-[0-9]{2}"},
}


class Row(Protocol):
    """One answer. `mask` is int32[ceil(V / 32)], filled by `fill`."""

    mask: np.ndarray

    def fill(self) -> None: ...

    def take(self, token: int) -> None: ...


class Guidance:
    """The classes that the worker uses."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._rules = CompiledRules(vocabulary)
        self._words = mask_words(vocabulary.vocab_tokens)

    def row(self, rule: dict[str, Any]) -> Row:
        matcher = self._rules.matcher(StructuredOutputsParams(**rule))
        masks = np.zeros((1, self._words), np.int32)

        class _Row:
            mask = masks[0]

            def fill(self) -> None:
                fill_masks([matcher], masks)

            def take(self, token: int) -> None:
                matcher.advance(token)

        return _Row()


class XGrammar:
    def __init__(self, folder: Path, vocab_tokens: int, eos: list[int]) -> None:
        import torch
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        self._torch, self._xgrammar = torch, xgrammar
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER_FILE))
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_tokens, stop_token_ids=eos
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._vocab_tokens = vocab_tokens

    def row(self, rule: dict[str, Any]) -> Row:
        if "json" in rule:
            text = msgspec.json.encode(rule["json"]).decode()
            compiled = self._compiler.compile_json_schema(text)
        else:
            compiled = self._compiler.compile_regex(rule["regex"])
        matcher = self._xgrammar.GrammarMatcher(compiled)
        bits = self._xgrammar.allocate_token_bitmask(1, self._vocab_tokens)

        class _Row:
            mask = bits.numpy()[0]

            def fill(self) -> None:
                matcher.fill_next_token_bitmask(bits)

            def take(self, token: int) -> None:
                matcher.accept_token(token)

        return _Row()


def timed_us(action: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    action()
    return (time.perf_counter() - began_s) * 1e6


def beginnings_us(engine: Guidance | XGrammar, rule: dict[str, Any], rows: list[Row]) -> float:
    """Of one more answer of the rule, which `rows` gets."""

    def begin() -> None:
        rows.append(engine.row(rule))
        rows[-1].fill()

    return timed_us(begin)


def steps_us(row: Row, n_tokens: int, ends: list[int], seed: int) -> Iterator[float]:
    """Of each token until the rule's end."""
    random = np.random.default_rng(seed)
    for _ in range(n_tokens):
        allowed = np.flatnonzero(np.unpackbits(row.mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, ends)]
        if len(allowed) == 0:
            return
        token = int(random.choice(allowed))
        yield timed_us(lambda token=token: (row.take(token), row.fill()))  # type: ignore[misc]


def measure(name: str, engine: Guidance | XGrammar, ends: list[int], args: Any) -> None:
    for kind, rule in RULES.items():
        rows: list[Row] = []
        first, *others = [beginnings_us(engine, rule, rows) for _ in range(args.rows)]
        steps = [
            each for seed, row in enumerate(rows) for each in steps_us(row, args.tokens, ends, seed)
        ]
        print(
            f"{name:12s} {kind:20s} first {first:9.0f}  next {median(others):7.0f}"
            f"  token {median(steps):7.1f}  p99 {quantiles(steps, n=100)[98]:7.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    card = load_prepared(args.folder)
    vocabulary = GrammarVocabulary(args.folder, card.vocab_tokens, card.eos_token_ids)
    measure("llguidance", Guidance(vocabulary), card.eos_token_ids, args)
    if importlib.util.find_spec("xgrammar") is not None:
        peer = XGrammar(args.folder, card.vocab_tokens, card.eos_token_ids)
        measure("xgrammar", peer, card.eos_token_ids, args)


if __name__ == "__main__":
    main()
