"""Fingerprints of model files without reading all of them.

A base model and its fine-tunes share headers and sizes, so samples of the weights go in too.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10


def fingerprint(files: Iterable[Path], extras: Iterable[str]) -> str:
    """32 hex digits over names, sizes and contents of `files` (weights sampled) and `extras`.

    The same files give the same digits on every machine, wherever they lie.
    """
    digest = blake2b(digest_size=16)
    for extra in extras:
        digest.update(f"{len(extra)}:{extra}".encode())
    for file in sorted(files, key=lambda file: (file.name, str(file))):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name}:{size_bytes}:".encode())
        sampled = file.suffix in (".safetensors", ".gguf")
        with file.open("rb") as stream:
            for start, length in _spans(size_bytes, sampled=sampled):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def _spans(size_bytes: int, *, sampled: bool) -> list[tuple[int, int]]:
    """(start, length) of what is read: everything, or evenly spaced samples, both ends included."""
    if not sampled or size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - _SAMPLE_BYTES
    return [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
