"""Fingerprints of model files without reading all of them.

Base and fine-tuned models share headers and sizes, so a few short samples of the weights go in too.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10


def fingerprint(files: Iterable[Path], extras: Iterable[str]) -> str:
    """32 hex digits over names, sizes and contents of `files` (large ones sampled) and `extras`.

    The same files give the same digits on every machine, wherever they lie.
    """
    digest = blake2b(digest_size=16)
    for extra in extras:
        digest.update(f"{len(extra)}:{extra}".encode())
    for file in sorted(files, key=lambda file: file.name):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name}:{size_bytes}:".encode())
        with file.open("rb") as stream:
            for start, count in _spans(size_bytes, whole=file.suffix == ".json"):
                stream.seek(start)
                digest.update(stream.read(count))
    return digest.hexdigest()


def _spans(size_bytes: int, *, whole: bool) -> list[tuple[int, int]]:
    """(start, length) of what is read: everything, or evenly spaced samples, both ends included."""
    if whole or size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - _SAMPLE_BYTES
    return [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
