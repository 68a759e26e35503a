"""Small tokenizers of every family, trained on the spot, and prepared folders around them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pagemesh.shared.prepared import MANIFEST, PreparedModel
from pagemesh.shared.settings import ModelSettings, Settings
from pagemesh.tokenizer_svc.text_model import TextModel

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Hello world! Hello there, how are you today? I am fine, thank you.",
    "Paged memory: pages, page tables, sharing, copy-on-write, eviction.",
    "naïve café, Ünïcödé, 世界 and 你好 and emoji 😀 too",
    "  two  spaces   and\nnew\n\nlines\tand tabs",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|user|>{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_level_json() -> bytes:
    """GPT-2 style: byte-level BPE, no BOS added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str().encode()


def sentencepiece_json() -> bytes:
    """Llama 2 style: word marks, byte fallback, a BOS in front of every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_byte_tokens(_trained(tokenizer))


def metaspace_json() -> bytes:
    """T5 style: word marks handled by one Metaspace, no byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _trained(tokenizer).to_str().encode()


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    latin = [line for line in CORPUS if line.isascii()]
    tokenizer.train_from_iterator(latin, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return tokenizer


def _with_byte_tokens(tokenizer: Tokenizer) -> bytes:
    """Byte tokens are ordinary entries of the model; no trainer makes them."""
    spec = json.loads(tokenizer.to_str())
    spec["model"]["byte_fallback"] = True
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return json.dumps(spec).encode()


def write_folder(
    folder: Path, tokenizer_json: bytes, template: str | None = CHAT_TEMPLATE, **manifest: object
) -> Settings:
    """A prepared folder without weights. Returns settings that serve it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    facts = {
        "name": "small",
        "source": "test",
        "architecture": "LlamaForCausalLM",
        "weights_format": "dummy",
        "weights": [],
        # A model may have more rows than its tokenizer has tokens.
        "vocab_tokens": tokenizer.get_vocab_size() + 2,
        "max_position_tokens": 128,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_ids": [tokenizer.token_to_id("</s>")],
        "template_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "fingerprint": "f00d",
        "created_s": 1,
    }
    prepared = PreparedModel(**{**facts, **manifest})  # type: ignore[arg-type]
    (folder / MANIFEST).write_bytes(msgspec.json.encode(prepared))
    return Settings(model=ModelSettings(model=str(folder)))


def text_model(folder: Path, settings: Settings) -> TextModel:
    prepared = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PreparedModel)
    return TextModel(folder, prepared, settings)
