"""Blocks that are kept outside the engine (contracts.small.KVStore): written as they are computed,
and fetched before a request starts.

All passes through the host tier. A new block is copied there with the next step, and a thread
writes it from there. A request is held while threads read its blocks into host memory, where the
prefix cache finds them. What fails, is late or damaged is computed: output depends on no store.

A block is stored behind its key, its parent's, its tokens, and a checksum of all. The key covers
the model, the number format, the ranks and the request's salt. A reader knows the
header it wants and compares it whole, so nothing that is read is ever interpreted.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.kvcache import BlockTable, CacheEntry, CachePlan, HostTier, KVCacheManager
from fastdeploy_core.loading.revision import fingerprint

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import KVStore
    from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

_Tasks = queue.SimpleQueue[Callable[[], None] | None]

MAGIC = b"FastDeploy KV block 1"
NO_PARENT = bytes(32)
CHECKSUM_BYTES = 16
NUM_READERS = 4
# Blocks on their way to the store. One more is left out: the store is slower than the model.
MAX_UNWRITTEN_SHARE = 0.5
CLOSE_GRACE_S = 5.0


class HostMemory:
    """The host tiers of all ranks of an engine, in memory that this process shares with them."""

    def __init__(self, num_ranks: int) -> None:
        self._files = [os.memfd_create(f"fd-host-tier-{rank}") for rank in range(num_ranks)]
        self.paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def open(self, num_blocks: int) -> None:
        """The ranks have made the files as large as they need."""
        views = [memoryview(mmap.mmap(file, 0)) for file in self._files]
        self._ranks = [(view, len(view) // num_blocks) for view in views]
        for file in self._files:
            os.close(file)

    def block(self, number: int) -> list[memoryview]:
        """The bytes of a host block on each rank."""
        return [view[number * size : (number + 1) * size] for view, size in self._ranks]


class _Fetch:
    """What is read for one request. A thread counts `num_read`; all else is its caller's."""

    def __init__(self, request_id: str, table: BlockTable, first: int, deadline_s: float) -> None:
        self.request_id, self.table = request_id, table
        self.first = first  # block of the table; those before it are in the prefix cache
        self.deadline_s = deadline_s  # monotonic
        self.blocks: list[int] = []  # reserved host blocks
        self.num_read = 0
        self.is_held, self.is_over = True, False  # the request waits for it; it is done


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
        if not plan.num_host_blocks:
            raise CapabilityError(
                f"--kv-store {cache.kv_store} needs the host tier, and {plan.report[-1]}"
            )
        # The prefix cache's model_identity.
        self.identity = _identity(config, infos)
        self._store, self._timeout_s = make_store(cache.kv_store_options), cache.kv_store_timeout_s
        self._memory = HostMemory(len(infos))
        self.paths = self._memory.paths  # where each rank's host tier is to lie
        self._fetches: list[_Fetch] = []
        self._noted: dict[int, list[tuple[CacheEntry, int]]] = {}  # by step
        self._num_unwritten = 0
        self._told: set[str] = set()  # failures that are in the log
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reads, self._writes = _threads("fd-kv-read", NUM_READERS), _threads("fd-kv-write", 1)
        self.num_read_total = self.num_written_total = self.num_failures_total = 0  # blocks

    def open(self, kv: KVCacheManager, host: HostTier) -> None:
        """The ranks have their host tiers, and this is the engine's cache."""
        self._kv, self._host = kv, host
        self._host.writes_through = True
        self._memory.open(host.num_blocks)

    @property
    def is_awaited(self) -> bool:
        """Whether a request is held for blocks."""
        return any(fetch.is_held for fetch in self._fetches)

    def fetch(self, request_id: str, table: BlockTable, token_ids: list[int]) -> bool:
        """Look for what the prefix cache lacks of a new request. True: `ready` will name it."""
        first = len(self._kv.match(table, token_ids).entries)
        if first == len(table.keys) or any(not fetch.is_held for fetch in self._fetches):
            return False  # while one is late, nobody waits for the store
        fetch = _Fetch(request_id, table, first, time.monotonic() + self._timeout_s)
        self._fetches.append(fetch)
        self._reads.put(partial(self._find, fetch, [key.hex() for key in table.keys[first:]]))
        return True

    def ready(self, wait_s: float = 0.0) -> list[str]:
        """Take in what threads have done: ids of requests that wait no more. With `wait_s`: wait at
        most so long for something."""
        try:
            while True:
                self._done.get(wait_s > 0, wait_s or None)()
                wait_s = 0.0
        except queue.Empty:
            pass
        now, ids = time.monotonic(), []
        for fetch in [f for f in self._fetches if f.is_held and (f.is_over or now > f.deadline_s)]:
            fetch.is_held = False
            ids.append(fetch.request_id)
            if not fetch.is_over:
                self._fail("read blocks", TimeoutError(f"not within {self._timeout_s:g} s"))
        # One that is late goes on until its last read has ended: it has host blocks.
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_over]
        return ids

    def note(self, step_id: int) -> None:
        """A step was planned; its copies may bring new blocks to host memory."""
        if written := self._host.take_written():
            self._noted[step_id] = written

    def settle(self, step_id: int, *, is_done: bool) -> None:
        """The step was done, or failed."""
        for entry, block in self._noted.pop(step_id, ()):
            is_full = self._num_unwritten >= self._host.num_blocks * MAX_UNWRITTEN_SHARE
            if not is_done or is_full:
                self._host.end_lease(block)
                continue
            self._num_unwritten += 1
            parent = NO_PARENT if entry.parent is None else entry.parent.key
            header = MAGIC + entry.key + parent + entry.tokens
            self._writes.put(partial(self._write, entry.key.hex(), header, block))

    def close(self) -> None:
        """Write what is on its way, as far as that is quick, and close the store. Idempotent."""
        for fetch in self._fetches:
            fetch.deadline_s = 0.0
        end_s = time.monotonic() + CLOSE_GRACE_S
        while (self._num_unwritten or self._fetches) and time.monotonic() < end_s:
            self.ready(0.05)
        self._writes.put(None)
        for _ in range(NUM_READERS):
            self._reads.put(None)
        if not self._num_unwritten and not self._fetches:
            self._store.close()

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """In a thread: the call's result, True for none; None where it fails, which is logged."""
        try:
            result = call()
            return True if result is None else result
        except Exception as error:
            self._done.put(partial(self._fail, what, error))
            return None

    def _find(self, fetch: _Fetch, names: list[str]) -> None:
        found = self._try("look for blocks", lambda: self._store.find(names)) or 0
        self._done.put(lambda: self._begin(fetch, names[:found]))

    def _read(self, fetch: _Fetch, names: list[str]) -> None:
        for block, name in zip(fetch.blocks, names, strict=False):
            is_late = time.monotonic() > fetch.deadline_s
            if is_late or not self._try("read blocks", partial(self._is_read, fetch, block, name)):
                break
            fetch.num_read += 1
        self._done.put(lambda: self._finish(fetch))

    def _is_read(self, fetch: _Fetch, block: int, name: str) -> bool:
        """Whether the next block has come, and as it was written."""
        number, table = fetch.first + fetch.num_read, fetch.table
        parent = table.keys[number - 1] if number else NO_PARENT
        wanted = MAGIC + table.keys[number] + parent + table.packed[number]
        checksum, header = bytearray(CHECKSUM_BYTES), bytearray(len(wanted))
        content = self._memory.block(block)
        if not self._store.get(name, [memoryview(checksum), memoryview(header), *content]):
            return False
        if header == wanted and checksum == _checksum(wanted, content):
            return True
        raise ValueError("one is damaged, and left alone")

    def _write(self, name: str, header: bytes, block: int) -> None:
        content = self._memory.block(block)
        parts = [memoryview(_checksum(header, content)), memoryview(header), *content]
        is_written = bool(self._try("write a block", partial(self._store.put, name, parts)))
        self._done.put(partial(self._wrote, block, is_written))

    def _fail(self, what: str, error: Exception) -> None:
        self.num_failures_total += 1
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._told:
            self._told.add(kind)
            text = "KV store %s could not %s (%s); what it lacks is computed again"
            logger.warning(text, self._store.name, what, error)

    def _begin(self, fetch: _Fetch, names: list[str]) -> None:
        if time.monotonic() < fetch.deadline_s:
            fetch.blocks = self._host.reserve(len(names))
        self._reads.put(partial(self._read, fetch, names))

    def _finish(self, fetch: _Fetch) -> None:
        fetch.is_over = True
        blocks = fetch.blocks[: fetch.num_read]
        self.num_read_total += self._kv.prefix.adopt(fetch.table, fetch.first, blocks)
        for block in fetch.blocks:
            self._host.end_lease(block)

    def _wrote(self, block: int, is_written: bool) -> None:
        self._num_unwritten -= 1
        self.num_written_total += is_written
        self._host.end_lease(block)


def _threads(name: str, number: int) -> _Tasks:
    """Threads that do what is put into the queue, each until it gets None. A store that hangs must
    not keep the process alive."""
    tasks: _Tasks = queue.SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            task()

    for _ in range(number):
        threading.Thread(target=work, name=name, daemon=True).start()
    return tasks


def _checksum(header: bytes, content: list[memoryview]) -> bytes:
    digest = hashlib.blake2b(header, digest_size=CHECKSUM_BYTES)
    for part in content:
        digest.update(part)
    return digest.digest()


def _identity(config: EngineConfig, infos: list[WorkerInfo]) -> str:
    """A text that stands for whatever the bytes of blocks depend on beside their tokens, on any
    host: the weights, what computes with them, and the layout of the cache on each rank."""
    model, drafts = config.model, config.speculative
    made_up = model.seed if model.load_format == "dummy" else None
    parts: list[Any] = [model.hf_config, model.dtype, model.quantization, made_up, drafts]
    draft_path = drafts.options.get("model") if drafts else None
    for path in (model.path, Path(draft_path or model.path)):
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        parts.append(fingerprint(files, with_times=False))
    for info in infos:
        parts += [info.kv_layout, info.block_size, info.tensor_library, info.drivers]
    return "\0".join(map(repr, [config.cache.kv_dtype, *parts]))
