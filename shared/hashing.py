"""The block hash chain: one binary layout for every service, pinned by golden vectors.

`hash_i = BLAKE2b-128(hash_{i-1} ‖ int32-LE token ids ‖ extras)`, where extras are the adapter name
and, on block 0, the cache salt. The chain start is sixteen zero bytes.
"""

from __future__ import annotations

from hashlib import blake2b

HASH_BYTES = 16
CHAIN_START = bytes(HASH_BYTES)
_TOKEN_BYTES = 4


def block_hash(parent: bytes, token_bytes: bytes, extras: bytes = b"") -> bytes:
    """Hash of one full block. `token_bytes` holds its ids as little-endian int32."""
    return blake2b(parent + token_bytes + extras, digest_size=HASH_BYTES).digest()


def chain_hashes(
    token_ids: bytes,
    block_tokens: int,
    *,
    parent: bytes = CHAIN_START,
    adapter: str = "",
    salt: str = "",
) -> list[bytes]:
    """Hashes of every full block of `token_ids` (int32-LE bytes), in order.

    With a `parent` other than CHAIN_START the chain goes on after it, and the salt, which belongs
    to block 0 alone, is not applied again.
    """
    block_bytes = block_tokens * _TOKEN_BYTES
    hashes: list[bytes] = []
    extras = _extras(adapter, salt if parent == CHAIN_START else "")
    for start in range(0, len(token_ids) - block_bytes + 1, block_bytes):
        parent = block_hash(parent, token_ids[start : start + block_bytes], extras)
        hashes.append(parent)
        if start == 0 and extras:
            extras = _extras(adapter, "")
    return hashes


def _extras(adapter: str, salt: str) -> bytes:
    """Length-prefixed, so that no adapter and salt can be split two ways."""
    if not adapter and not salt:
        return b""
    parts = (adapter.encode(), salt.encode())
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split_hashes(packed: bytes) -> list[bytes]:
    """The hashes of a packed run, as they travel on the wire."""
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
