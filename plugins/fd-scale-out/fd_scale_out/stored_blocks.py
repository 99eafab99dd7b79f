"""Blocks that are kept outside the engine (contracts.small.KVStore): written as they are computed,
and fetched before a request starts.

All passes through the host tier. A new block is copied there with the next step, and a thread
writes it from there. A request is held while threads read its blocks into host memory, where the
prefix cache finds them. What fails, is late or damaged is computed: output depends on no store.

A block is stored after its group of layers, its key, its parent's, its tokens, and a checksum of
all. The key covers the model, the number format, the ranks and the request's salt. A reader knows
the header it wants and compares it whole, so nothing that is read is ever interpreted.

A prefix is fetched up to where every group of layers (kvcache.groups) has all that resuming there
takes, here or in the store.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.kvcache import BlockTable, CacheEntry, CachePlan
from fastdeploy_core.scheduler import BatchScheduler
from fastdeploy_core.types import Request
from fastdeploy_core.types.engine import EngineStats

from .handover.parts import Tiers
from .host_blocks import HostMemory, identity_of, parts_of, run_threads

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import KVStore
    from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

MAGIC = b"FastDeploy KV block 2"
NO_PARENT = bytes(32)
CHECKSUM_BYTES = 16
NUM_READERS = 4
# Blocks on their way to the store. One more is left out: the store is slower than the model.
MAX_UNWRITTEN_SHARE = 0.5
CLOSE_GRACE_S = 5.0
# For shorter prefixes where the longest cannot be resumed: a store may wait for each name.
LOOK_S = 0.25


class _Piece(NamedTuple):
    """What one group of layers keeps of a block of tokens."""

    group: int
    nth: int  # block of tokens of its table

    def name(self, key: bytes) -> str:
        """The store's name for it. key: of the block of tokens."""
        return (hashlib.sha256(bytes([self.group]) + key).digest() if self.group else key).hex()

    def header(self, key: bytes, parent: bytes, tokens: bytes) -> bytes:
        """What stands in front of its bytes."""
        return MAGIC + bytes([self.group]) + key + parent + tokens


class _Fetch:
    """What is read for one request. A thread counts `num_read`; all else is its caller's."""

    def __init__(
        self, request_id: str, table: BlockTable, here: set[_Piece], deadline_s: float
    ) -> None:
        self.request_id, self.table = request_id, table
        self.here = here  # what needs not be read
        self.first = sum(piece.group == 0 for piece in here)  # block of tokens to begin with
        self.deadline_s = deadline_s  # monotonic
        self.pieces: list[_Piece] = []  # to be read
        self.blocks: list[int] = []  # reserved host blocks for them, as Tiers numbers them
        self.num_read = 0
        self.is_held, self.is_over = True, False  # the request waits for it; it is done

    def names(self, pieces: Sequence[_Piece]) -> list[str]:
        """Of each piece."""
        return [piece.name(self.table.keys[piece.nth]) for piece in pieces]


class StoredBlocks:
    """Entry point `kv-store`: between a prefix cache and a store. One thread calls; `ready` says
    which requests go on."""

    def __init__(
        self,
        config: EngineConfig,
        infos: list[WorkerInfo],
        plan: CachePlan,
        make_store: Callable[[Mapping[str, Any]], KVStore],
    ) -> None:
        """CapabilityError where there is no host tier, and what `make_store` raises."""
        cache = config.cache
        self._memory = HostMemory(len(infos), plan, f"--kv-store {cache.kv_store}")
        self.paths = self._memory.paths  # where each rank's host tier is to lie
        # The prefix cache's model_identity.
        self.identity = identity_of(config, infos)
        self.report = f"KV store: {cache.kv_store}, behind the host KV tier"
        self._store, self._timeout_s = make_store(cache.kv_store_options), cache.kv_store_timeout_s
        self._fetches: list[_Fetch] = []
        self._noted: dict[int, list[tuple[int, CacheEntry, int]]] = {}  # by step
        self._num_unwritten = Counter[int]()  # by group
        self._told: set[str] = set()  # failures that are in the log
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reads = run_threads("fd-kv-read", NUM_READERS)
        self._writes = run_threads("fd-kv-write", 1)
        self.num_read_total = self.num_written_total = self.num_failures_total = 0  # blocks

    def open(self, scheduler: BatchScheduler) -> None:
        """The ranks have their host tiers, and this is the engine's batch scheduler."""
        self._kv = scheduler.kv
        self._memory.open(scheduler.kv)
        self._tiers = Tiers(scheduler.kv.tiers)
        self._tiers.write_through(True)

    def prepare(self, request: Request) -> Request:
        """The request as the engine gets it."""
        return request

    @property
    def is_awaited(self) -> bool:
        """Whether a request is held for blocks."""
        return any(fetch.is_held for fetch in self._fetches)

    def fetch(self, request: Request, table: BlockTable, token_ids: list[int]) -> bool:
        """Look for what the prefix cache lacks of a new request. True: `ready` will name it."""
        num_resumable = len(self._kv.match(table, token_ids).entries)
        if num_resumable == len(table.keys) or any(not fetch.is_held for fetch in self._fetches):
            return False  # while one is late, nobody waits for the store
        known = self._kv.prefix.match(table, len(table.keys))
        here = {_Piece(0, index) for index in range(len(known))}
        for number, group in enumerate(self._kv.bounded, 1):
            here |= {_Piece(number, i) for i, entry in enumerate(known) if group.has(entry)}
        fetch = _Fetch(request.request_id, table, here, time.monotonic() + self._timeout_s)
        self._fetches.append(fetch)
        self._reads.put(partial(self._find, fetch, num_resumable))
        return True

    def ready(self, wait_s: float = 0.0) -> list[tuple[str, None]]:
        """Take in what threads have done: ids of requests that wait no more, each with its first
        token, of which a store knows nothing. With `wait_s`: wait at most so long for something."""
        try:
            while True:
                self._done.get(wait_s > 0, wait_s or None)()
                wait_s = 0.0
        except queue.Empty:
            pass
        now, ids = time.monotonic(), list[tuple[str, None]]()
        for fetch in [f for f in self._fetches if f.is_held and (f.is_over or now > f.deadline_s)]:
            fetch.is_held = False
            ids.append((fetch.request_id, None))
            if not fetch.is_over:
                self._fail("read blocks", TimeoutError(f"not within {self._timeout_s:g} s"))
        # One that is late goes on until its last read has ended: it has host blocks.
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_over]
        return ids

    def wake(self) -> None:
        """End a wait of `ready`; from any thread."""
        self._done.put(lambda: None)

    def note(self, step_id: int) -> None:
        """A step was planned; its copies may bring new blocks to host memory."""
        if written := self._tiers.take_written():
            self._noted[step_id] = written

    def settle(self, step_id: int, *, is_done: bool) -> None:
        """The step was done, or failed."""
        for group, entry, block in self._noted.pop(step_id, ()):
            most = self._tiers.all[group].num_blocks * MAX_UNWRITTEN_SHARE
            if not is_done or self._num_unwritten[group] >= most:
                self._tiers.end_lease(block)
                continue
            self._num_unwritten[group] += 1
            parent = NO_PARENT if entry.parent is None else entry.parent.key
            piece = _Piece(group, 0)
            header = piece.header(entry.key, parent, entry.tokens)
            self._writes.put(partial(self._write, piece.name(entry.key), header, block))

    def told(self, outputs: list[Any]) -> None:
        """What clients are told; a store keeps nothing of it."""

    def count(self, stats: EngineStats) -> None:
        """Fill in what is counted here."""
        stats.kv_store_read_blocks_total = self.num_read_total
        stats.kv_store_written_blocks_total = self.num_written_total
        stats.kv_store_failures_total = self.num_failures_total

    def close(self) -> None:
        """Write what is on its way, as far as that is quick, and close the store. Idempotent."""
        for fetch in self._fetches:
            fetch.deadline_s = 0.0
        end_s = time.monotonic() + CLOSE_GRACE_S
        while (self._num_unwritten.total() or self._fetches) and time.monotonic() < end_s:
            self.ready(0.05)
        self._writes.put(None)
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._memory.close()
        if not self._num_unwritten.total() and not self._fetches:
            self._store.close()

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """In a thread: the call's result, True for none; None where it fails, which is logged."""
        try:
            result = call()
            return True if result is None else result
        except Exception as error:
            self._done.put(partial(self._fail, what, error))
            return None

    def _find(self, fetch: _Fetch, num_resumable: int) -> None:
        pieces = self._try("look for blocks", lambda: self._pieces(fetch, num_resumable)) or []
        self._done.put(lambda: self._begin(fetch, pieces))

    def _pieces(self, fetch: _Fetch, num_resumable: int) -> list[_Piece]:
        """In a thread: what is to be read so that every group has what resuming takes after as many
        blocks of tokens as possible, and more than num_resumable."""
        tokens = [_Piece(0, index) for index in range(fetch.first, len(fetch.table.keys))]
        tokens = tokens[: self._num_found(fetch, tokens)]
        if not self._kv.bounded:
            return tokens
        end_s = time.monotonic() + LOOK_S
        for end in range(fetch.first + len(tokens), num_resumable, -1):
            needed = self._needed_at(fetch, end)
            if all(self._num_found(fetch, own) == len(own) for own in needed):
                return [*tokens[: max(0, end - fetch.first)], *itertools.chain(*needed)]
            if time.monotonic() > end_s:
                break
        return []

    def _needed_at(self, fetch: _Fetch, end: int) -> list[list[_Piece]]:
        """Of each bounded group what resuming after `end` blocks of tokens takes, less what is
        here."""
        groups = enumerate(self._kv.bounded, 1)
        needed = [[_Piece(number, i) for i in group.needed(end)] for number, group in groups]
        return [[piece for piece in own if piece not in fetch.here] for own in needed]

    def _num_found(self, fetch: _Fetch, pieces: list[_Piece]) -> int:
        """How many of the leading ones the store has; 0 where it is too late to ask."""
        is_late = time.monotonic() > fetch.deadline_s
        return self._store.find(fetch.names(pieces)) if pieces and not is_late else 0

    def _read(self, fetch: _Fetch) -> None:
        for piece, block in zip(fetch.pieces, fetch.blocks, strict=True):
            is_late = time.monotonic() > fetch.deadline_s
            if is_late or not self._try("read blocks", partial(self._is_read, fetch, piece, block)):
                break
            fetch.num_read += 1
        self._done.put(lambda: self._finish(fetch))

    def _is_read(self, fetch: _Fetch, piece: _Piece, block: int) -> bool:
        """Whether a piece has come, and as it was written."""
        table, number = fetch.table, piece.nth
        parent = table.keys[number - 1] if number else NO_PARENT
        wanted = piece.header(table.keys[number], parent, table.packed[number])
        checksum, header = bytearray(CHECKSUM_BYTES), bytearray(len(wanted))
        content = self._content(block)
        (name,) = fetch.names([piece])
        if not self._store.get(name, [memoryview(checksum), memoryview(header), *content]):
            return False
        if header == wanted and checksum == _checksum(wanted, content):
            return True
        raise ValueError("one is damaged, and left alone")

    def _write(self, name: str, header: bytes, block: int) -> None:
        content = self._content(block)
        parts = [memoryview(_checksum(header, content)), memoryview(header), *content]
        is_written = bool(self._try("write a block", partial(self._store.put, name, parts)))
        self._done.put(partial(self._wrote, block, is_written))

    def _content(self, block: int) -> list[memoryview]:
        """The bytes of a host block on each rank."""
        group, number = self._tiers.place(block)
        return parts_of(self._memory.groups[group], number)

    def _fail(self, what: str, error: Exception) -> None:
        self.num_failures_total += 1
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._told:
            self._told.add(kind)
            text = "KV store %s could not %s (%s); what it lacks is computed again"
            logger.warning(text, self._store.name, what, error)

    def _begin(self, fetch: _Fetch, pieces: list[_Piece]) -> None:
        """Reserve host blocks. Of one group the leading blocks alone are worth it, too."""
        if time.monotonic() < fetch.deadline_s:
            for group, count in sorted(Counter(piece.group for piece in pieces).items()):
                fetch.blocks += self._tiers.reserve(group, count)
            if self._kv.bounded and len(fetch.blocks) < len(pieces):
                self._end_leases(fetch)
        fetch.pieces = pieces[: len(fetch.blocks)]
        self._reads.put(partial(self._read, fetch))

    def _finish(self, fetch: _Fetch) -> None:
        fetch.is_over = True
        came = list(zip(fetch.pieces, fetch.blocks, strict=True))[: fetch.num_read]
        first = [block for piece, block in came if not piece.group]
        self.num_read_total += self._kv.prefix.adopt(fetch.table, fetch.first, first)
        known = self._kv.prefix.match(fetch.table, len(fetch.table.keys)) if came else []
        for piece, block in came[len(first) :]:
            group = self._kv.bounded[piece.group - 1]
            if piece.nth < len(known) and not group.has(known[piece.nth]):
                group.adopt(known[piece.nth], self._tiers.place(block)[1])
                self.num_read_total += 1
        self._end_leases(fetch)

    def _end_leases(self, fetch: _Fetch) -> None:
        for block in fetch.blocks:
            self._tiers.end_lease(block)
        fetch.blocks = []

    def _wrote(self, block: int, is_written: bool) -> None:
        self._num_unwritten[self._tiers.place(block)[0]] -= 1
        self.num_written_total += is_written
        self._tiers.end_lease(block)


def _checksum(header: bytes, content: list[memoryview]) -> bytes:
    digest = hashlib.blake2b(header, digest_size=CHECKSUM_BYTES)
    for part in content:
        digest.update(part)
    return digest.digest()
