"""The prefix index: which engine holds which block, as keys in Redis. Advice, never truth.

A block is known by 62 bits of its hash, mixed with the identity of its model (`index_keys`), so
that blocks of two models never meet. The first two bytes, but for two bits, choose one of 16,384
small hashes `{mesh}:prefix:` ‖ two bytes; the other six are a field in it, and its value lists the
engines that hold the block, two bytes each. A hash of up to 512 such fields is one packed string in
Redis, so a block takes 13 to 20 bytes. A block lists MAX_HOLDERS engines at most: further ones are
not worth knowing.

Engines are numbers here. One is claimed by an owner (one opening of one engine), held by the key
`{mesh}:prefix:engine:{number}` for REGISTRATION_S after each of the owner's calls, and not used
again while that key lives. An engine that comes anew takes a new number: what is written under the
old one is nobody's at once, and leaves with the next rewriting of its shard, whoever's that is.
Every script looks at the owner first: Redis may have been flushed, and the number be another's now.

The scripts name keys that their arguments do not, so the index wants one Redis, not a cluster.
"""

from __future__ import annotations

import asyncio
from array import array
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from pagemesh.shared.hashing import HASH_BYTES
from pagemesh.shared.messages import ModelCard

KEY_BYTES: Final = 8
_HOLDER_BYTES: Final = 2
REGISTRATION_S: Final = 30.0
MAX_HOLDERS: Final = 30
N_FIRST: Final = 256
"""Values of a key's first byte. Each has 64 shards, by the second byte, whose last two bits are 0:
with fewer blocks to a shard, the shards themselves would take more memory than the blocks."""
SHARD_STEP: Final = 4
_USED_BITS: Final = bytes([0xFF, 0x100 - SHARD_STEP, *(0xFF for _ in range(KEY_BYTES - 2))])
_MAX_PROBES: Final = 64
_MAX_VISITED: Final = 512
"""Entries that one rewriting looks at, at least: a millisecond of Redis's time."""
_TIMEOUT_S: Final = 2.0
_TTL_MS: Final = int(REGISTRATION_S * 1000)

# KEYS: counter. ARGV: owner, TTL, prefix of the engines' keys. Returns the number, 0 when all are
# taken.
_REGISTER: Final = """
for _ = 1, 65535 do
  local number = redis.call('INCR', KEYS[1]) % 65535 + 1
  if redis.call('SET', ARGV[3] .. number, ARGV[1], 'NX', 'PX', ARGV[2]) then return number end
end
return 0
"""
# What _PUBLISH and _REWRITE share. ARGV: owner, TTL, prefix of the shards, number.
# `standing`: 0 the number is another's, 1 it was ours, 2 it was nobody's and is ours again.
_OWN: Final = """
local held_by = redis.call('GET', KEYS[1])
local standing = not held_by and 2 or held_by == ARGV[1] and 1 or 0
if standing == 0 then return {0, 0} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local prefix, number = ARGV[3], tonumber(ARGV[4])
local ours = string.char(math.floor(number / 256), number % 256)

local function without(holders, unwanted)
  local kept = {}
  for i = 1, #holders, 2 do
    local holder = string.sub(holders, i, i + 1)
    if not unwanted(holder) then kept[#kept + 1] = holder end
  end
  return #kept * 2 == #holders and holders or table.concat(kept)
end

local function is_ours(holder) return holder == ours end

local function has_ours(holders)
  for i = 1, #holders, 2 do
    if string.sub(holders, i, i + 1) == ours then return true end
  end
  return false
end

local function write(shard, field, before, after)
  if after == before then return end
  if after == '' then redis.call('HDEL', shard, field)
  else redis.call('HSET', shard, field, after) end
end
"""
# KEYS: the engine's. ARGV further: added keys, removed keys, the most holders' bytes.
_PUBLISH: Final = (
    _OWN
    + """
local added, removed, limit = ARGV[5], ARGV[6], tonumber(ARGV[7])
for i = 1, #added, 8 do
  local shard, field = prefix .. string.sub(added, i, i + 1), string.sub(added, i + 2, i + 7)
  if redis.call('HSETNX', shard, field, ours) == 0 then
    local holders = redis.call('HGET', shard, field)
    if #holders < limit and not has_ours(holders) then
      redis.call('HSET', shard, field, holders .. ours)
    end
  end
end
for i = 1, #removed, 8 do
  local shard, field = prefix .. string.sub(removed, i, i + 1), string.sub(removed, i + 2, i + 7)
  local holders = redis.call('HGET', shard, field) or ''
  write(shard, field, holders, without(holders, is_ours))
end
return {standing, 0}
"""
)
# KEYS: the engine's. ARGV further: the shards' first byte, the second to begin with, the keys held
# there, the most holders' bytes, the most entries to look at, prefix of the engines' keys, the step
# from one second byte to the next. Returns the standing, and the second byte to go on with (256 at
# the end).
_REWRITE: Final = (
    _OWN
    + """
local first, second, held, limit = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local wanted = {}
for i = 1, #held, 8 do
  local of_shard = wanted[string.byte(held, i + 1)] or {}
  of_shard[string.sub(held, i + 2, i + 7)] = true
  wanted[string.byte(held, i + 1)] = of_shard
end

local dead = {}
local function is_dead(holder)
  if holder == ours then return false end
  if dead[holder] == nil then
    local high, low = string.byte(holder, 1, 2)
    dead[holder] = redis.call('EXISTS', ARGV[10] .. high * 256 + low) == 0
  end
  return dead[holder]
end

local visited = 0
while second < 256 and visited < tonumber(ARGV[9]) do
  local shard, missing = prefix .. string.char(first, second), wanted[second] or {}
  local entries = redis.call('HGETALL', shard)
  for i = 1, #entries, 2 do
    local field, before = entries[i], entries[i + 1]
    local after = before == ours and before or without(before, is_dead)
    if not missing[field] then after = without(after, is_ours)
    elseif #after < limit and not has_ours(after) then after = after .. ours end
    missing[field] = nil
    write(shard, field, before, after)
  end
  for field in pairs(missing) do redis.call('HSET', shard, field, ours) end
  visited, second = visited + #entries / 2, second + tonumber(ARGV[11])
end
return {standing, second}
"""
)
# ARGV: prefix of the shards, the keys of a chain, the most probes. Returns number, depth, number,
# depth … What an engine holds of a chain is its beginning (heads outlive tails), so an engine seen
# at a block holds those before it, and the end of what it holds is found by halving: first of what
# anybody holds, from the beginning in doubling steps, then wherever two probes show other engines.
# Without probes left, the depths are those seen.
_DEPTHS: Final = """
local prefix, keys, left = ARGV[1], ARGV[2], tonumber(ARGV[3])
local count, depths = #keys / 8, {}

local function holders_at(index)
  left = left - 1
  local at = index * 8
  local shard, field = string.sub(keys, at - 7, at - 6), string.sub(keys, at - 5, at)
  local holders, seen = redis.call('HGET', prefix .. shard, field) or '', {}
  for i = 1, #holders, 2 do
    local high, low = string.byte(holders, i, i + 1)
    local number = high * 256 + low
    seen[number] = true
    if index > (depths[number] or 0) then depths[number] = index end
  end
  return seen
end

local function ends_between(low, high)
  for _, depth in pairs(depths) do
    if depth >= low and depth < high then return true end
  end
  return false
end

local function refine(low, high)
  if high - low < 2 or left <= 0 or not ends_between(low, high) then return end
  local middle = math.floor((low + high) / 2)
  holders_at(middle)
  refine(middle, high)
  refine(low, middle)
end

local probed, index = {}, 1
while index <= count and left > 0 do
  probed[#probed + 1] = index
  if next(holders_at(index)) == nil then break end
  index = index == count and count + 1 or math.min(index * 2, count)
end
if index > count then probed[#probed + 1] = count + 1 end
for i = #probed - 1, 1, -1 do refine(probed[i], probed[i + 1]) end

local flat = {}
for number, depth in pairs(depths) do
  flat[#flat + 1] = number
  flat[#flat + 1] = depth
end
return flat
"""


class Standing(IntEnum):
    """What Redis says of a number, before it writes anything for it."""

    TAKEN = 0
    """Another owner has it: nothing was written. Claim a new one."""
    OURS = 1
    FORGOTTEN = 2
    """Nobody had it, so it is ours again; what was written before may be gone as well."""


class Claim(NamedTuple):
    """An engine's number, and who claimed it."""

    number: int
    owner: str


def index_keys(hashes: bytes, card: ModelCard) -> bytes:
    """The packed keys of packed block hashes of the model of `card`, KEY_BYTES each."""
    identity = f"{card.fingerprint}/{card.block_tokens}".encode()
    [mask] = array("Q", blake2b(identity, digest_size=KEY_BYTES).digest())
    [used] = array("Q", _USED_BITS)
    halves = memoryview(hashes).cast("Q")[:: HASH_BYTES // KEY_BYTES]
    return array("Q", [(half ^ mask) & used for half in halves]).tobytes()


def first_bytes(card: ModelCard) -> list[int]:
    """By the first byte of a block hash, the first byte of its key."""
    return [index_keys(bytes([byte]) + bytes(HASH_BYTES - 1), card)[0] for byte in range(N_FIRST)]


class PrefixIndex:
    """The index of one mesh. Every method raises redis.RedisError, OSError or TimeoutError when
    Redis is away."""

    def __init__(self, redis: Redis, mesh_name: str) -> None:
        self._shards = f"{mesh_name}:prefix:".encode()
        self._engines = f"{mesh_name}:prefix:engine:"
        self._counter = f"{mesh_name}:prefix:engines"
        self._register = redis.register_script(_REGISTER)
        self._publish = redis.register_script(_PUBLISH)
        self._rewrite = redis.register_script(_REWRITE)
        self._depths = redis.register_script(_DEPTHS)

    async def claim(self, owner: str) -> Claim:
        """A number that nobody has. Raises redis.RedisError when all are taken."""
        number = await self._call(self._register, [self._counter], [owner, _TTL_MS, self._engines])
        if not number:
            raise RedisError("all numbers of the prefix index are taken")
        return Claim(number, owner)

    async def publish(self, claim: Claim, added: bytes, removed: bytes) -> Standing:
        """The engine holds the blocks of the keys `added`, and those `removed` no longer. Renews
        the claim."""
        most = MAX_HOLDERS * _HOLDER_BYTES
        standing, _ = await self._own(self._publish, claim, [added, removed, most])
        return standing

    async def rewrite(
        self, claim: Claim, first: int, second: int, held: bytes
    ) -> tuple[Standing, int]:
        """Make the shards of the keys that begin with byte `first`, and then `second` or more, say
        of the engine what is true: it holds `held`, all its keys there, and nothing else. Entries
        of engines that are gone leave these shards. Renews the claim.

        Returns which second byte to go on with; N_FIRST when all were seen.
        """
        most = MAX_HOLDERS * _HOLDER_BYTES
        further: list[bytes | str | int] = [
            first,
            second,
            held,
            most,
            _MAX_VISITED,
            self._engines,
            SHARD_STEP,
        ]
        return await self._own(self._rewrite, claim, further)

    async def depths(self, keys: bytes) -> dict[int, int]:
        """Of the engines that hold the beginning of a chain: number → how many leading blocks."""
        flat = await self._call(self._depths, [], [self._shards, keys, _MAX_PROBES])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _own(
        self, script: AsyncScript, claim: Claim, further: list[bytes | str | int]
    ) -> tuple[Standing, int]:
        keys = [f"{self._engines}{claim.number}"]
        arguments = [claim.owner, _TTL_MS, self._shards, claim.number, *further]
        standing, second = await self._call(script, keys, arguments)
        return Standing(standing), int(second)

    async def _call(
        self, script: AsyncScript, keys: list[str], arguments: list[bytes | str | int]
    ) -> Any:
        async with asyncio.timeout(_TIMEOUT_S):
            return await script(keys=keys, args=arguments)
