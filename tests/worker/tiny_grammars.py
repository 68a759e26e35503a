"""Rules over a vocabulary of single characters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagemesh.shared.grammar import TOKENIZER_FILE, GrammarVocabulary
from pagemesh.worker_svc.grammars import Grammars

END = "<end>"


def characters(vocab_tokens: int, eos: int) -> list[str]:
    """The text of each id: printable characters first, the end at `eos`."""
    found = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_tokens - 1]
    return [*found[:eos], END, *found[eos:]]


@cache
def tiny_vocabulary(vocab_tokens: int, eos: int) -> GrammarVocabulary:
    ids = {text: token for token, text in enumerate(characters(vocab_tokens, eos))}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    with TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder, TOKENIZER_FILE)))
        return GrammarVocabulary(Path(folder), vocab_tokens, [eos])


def tiny_grammars(vocab_tokens: int, eos: int) -> Grammars:
    return Grammars(lambda: tiny_vocabulary(vocab_tokens, eos), vocab_tokens)
