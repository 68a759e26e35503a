"""A random two-layer Llama with a byte-level tokenizer and a chat template, as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS: Final = "a page table maps the tokens of a sequence to the blocks of the pool, page by page"
TOKENIZER_TOKENS: Final = 298
VOCAB_TOKENS: Final = 320  # as real models, more rows than the tokenizer has tokens
MAX_TOKENS: Final = 128
BOS, EOS = 0, 1


def save_tiny_llama(folder: Path) -> Path:
    """Write the model to `folder` (weights, config, tokenizer) and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _tokenizer().save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _tokenizer():  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_TOKENS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
