"""Which instance has which blocks cached, by what the engines themselves say (vLLM's KV events).

A block's key is made here from its tokens and those before it, so that it can be compared with a
request's. The engine's own hash of a block only tells which one is removed.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from .prefix_index import Key, chained_keys

TOKEN_BYTES = 4
MAX_BLOCKS = 4096  # of a prompt are compared


def token_keys(tokens: bytes, block_size: int, scope: str = "") -> list[Key]:
    """Keys of a prompt's full blocks. tokens: ids of four bytes each; scope: the salt of its
    first block, see EventIndex."""
    salt = _salt(None, [scope] if scope else [])
    return chained_keys(tokens, block_size * TOKEN_BYTES, salt, MAX_BLOCKS)


class EventIndex:
    """Blocks by instance and engine. An engine publishes in batches; see follower.py."""

    def __init__(self) -> None:
        self.block_size = 0  # tokens; 0: no engine has stored a block yet
        # By engine (instance, number): each block's key by the engine's hash. Two hashes may have
        # one key, where an engine's hash covers more than tokens.
        self._keys: dict[tuple[str, int], dict[int, Key]] = {}
        self._counts: dict[tuple[str, int], Counter[Key]] = {}
        self._engines: dict[str, set[int]] = {}

    def begin(self, instance: str, engine: int) -> None:
        """The engine's events are followed from now on, from an empty cache."""
        self._keys[instance, engine] = {}
        self._counts[instance, engine] = Counter()
        self._engines.setdefault(instance, set()).add(engine)

    def forget(self, instance: str, engine: int) -> None:
        """They are not followed any more."""
        self._keys.pop((instance, engine), None)
        self._counts.pop((instance, engine), None)
        left = self._engines.get(instance, set())
        left.discard(engine)
        if not left:
            self._engines.pop(instance, None)

    @property
    def is_used(self) -> bool:
        """Whether any instance says what it has cached."""
        return bool(self._engines and self.block_size)

    def follows(self, instance: str) -> bool:
        """Whether it is known what the instance has cached."""
        return instance in self._engines

    def num_blocks(self, instance: str) -> int:
        """Blocks that its engines hold."""
        return sum(len(self._keys[instance, one]) for one in self._engines.get(instance, ()))

    def apply(self, instance: str, engine: int, events: Iterable[Sequence[Any]]) -> None:
        """A batch of events, each a kind and its fields in vLLM's order. ValueError, KeyError,
        TypeError or IndexError for what is none."""
        keys, counts = self._keys[instance, engine], self._counts[instance, engine]
        for kind, *fields in events:
            if kind == "BlockStored":
                self._store(keys, counts, fields)
            elif kind == "BlockRemoved":
                for name in map(_number, fields[0]):
                    # One whose beginning was missed is not known.
                    if name in keys:
                        _drop(counts, keys.pop(name))
            elif kind == "AllBlocksCleared":
                keys.clear()
                counts.clear()
            else:
                raise ValueError(f"unknown event {kind!r:.40}")

    def cached_tokens(self, instance: str, chains: Sequence[Sequence[Key]]) -> int:
        """Tokens at the beginning of a prompt that one of the instance's engines has. chains: the
        prompt's keys in each scope that it may have there."""
        held = [self._counts[instance, one] for one in self._engines.get(instance, ())]
        most = 0
        for counts in held:
            for chain in chains:
                # An engine may keep a block and evict one before it, so each is looked up.
                run = next((n for n, key in enumerate(chain) if key not in counts), len(chain))
                most = max(most, run)
        return most * self.block_size

    def owners(self, chains: Sequence[Sequence[Key]]) -> set[str]:
        """The instances that have the longest beginning; empty where none has any."""
        found = {name: self.cached_tokens(name, chains) for name in self._engines}
        most = max(found.values(), default=0)
        return {name for name, tokens in found.items() if tokens == most} if most else set()

    def _store(self, keys: dict[int, Key], counts: Counter[Key], fields: Sequence[Any]) -> None:
        hashes, parent, tokens, size, *more = fields
        _, _, adapter, extra, *_ = (*more, None, None, None, None)
        self.block_size = int(size)
        if len(tokens) != len(hashes) * size:
            raise ValueError(f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
        data = array("I", tokens).tobytes()
        last = None if parent is None else keys.get(_number(parent))
        if parent is not None and last is None:
            return  # its beginning was missed
        for place, name in enumerate(map(_number, hashes)):
            block = data[place * size * TOKEN_BYTES : (place + 1) * size * TOKEN_BYTES]
            covered: list[Any] = list(extra[place] or ()) if extra else []
            if last is None:
                last = chained_keys(block, len(block), _salt(adapter, covered))[0]
            else:
                more_bytes = json.dumps(covered).encode() if covered else b""
                last = blake2b(block + more_bytes, digest_size=16, key=last).digest()
            if name in keys:
                _drop(counts, keys[name])
            keys[name] = last
            counts[last] += 1


def _drop(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _number(name: Any) -> int:
    """Engines write 64 bits or a whole digest, of which those are the end."""
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else int(name)


def _salt(adapter: str | None, covered: list[Any]) -> bytes:
    return json.dumps([adapter, covered], default=str).encode()
