"""Entry point `kv-handover`: between an engine, its host tier and a KV transport.

Everything happens in the engine's thread, in `ready`, but for checksums, which a thread computes.
No call waits for another instance. Blocks of a prompt that is computed for another instance are
copied to the host tier with the step after the one that made them, and lie there, leased, until the
other instance has pulled them or its lease is over.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec
from crc32c import crc32c

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    Region,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
    TransportCapabilities,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, FastDeployError
from fastdeploy_core.kvcache import BlockTable, CacheEntry, CachePlan
from fastdeploy_core.scheduler import BatchScheduler
from fastdeploy_core.types import InstanceRole, Request, RequestOutputDelta, SequenceDelta
from fastdeploy_core.types.engine import EngineStats
from fd_scale_out.host_blocks import HostMemory, identity_of, parts_of, run_threads
from fd_scale_out.receiver_driven import DECODE_ERRORS, MAX_NOTE_BYTES

from . import messages
from .messages import Abort, Aborted, Accept, Alive, Commit, First, Have, Hello, Want
from .parts import Parts, Tiers
from .receiving import Pull, Receiving
from .sending import BEAT_S, Sending
from .splitting import Layout, Staging, layout_of
from .ticket import Order, Ticket, make_ticket, read_order, read_ticket, shared_secret

if TYPE_CHECKING:
    from fastdeploy_core.contracts.kv_transport import KVTransport
    from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

# Of the blocks of one pull: notes wait behind it. Device memory is copied in a tenth of the time,
# and what passes besides, back and forth, takes as long for many blocks as for few.
MAX_HAVE_BYTES: Final = 32 * 2**20
MAX_DEVICE_HAVE_BYTES: Final = 512 * 2**20
MAX_HELD_SHARE: Final = 0.8  # of the host tier, for other instances to fetch
MAX_QUARANTINE_SHARE: Final = 0.05  # of the host tier; beyond that the transport is opened anew
MAX_LAYOUTS: Final = 4  # of other instances; memory for each of their blocks is set aside
MAX_EARLY: Final = 1024  # Wants that came before their prompts
# Of --kv-transport-timeout. A prompt that takes longer to get into this engine is computed by who
# wants it: the queue here is too long.
EARLY_SHARE: Final = 1 / 12


@runtime_checkable
class DeviceSums(Protocol):
    """A KVTransport with capability `device_memory` is one, too."""

    def checksums(self, region_id: int, blocks: Sequence[int]) -> list[int]:
        """32 bits of each of these blocks of a region of ours; from any thread. It waits for the
        device."""
        ...


class _Incoming:
    """What a Receiving has done: its ReceivingWorld."""

    def __init__(
        self,
        owner: Handovers,
        request: Request,
        table: BlockTable,
        parts: Parts,
        staging: Staging | None,
    ) -> None:
        """staging: where blocks of an instance with another number of ranks arrive."""
        self._owner, self._request, self._table, self._staging = owner, request, table, staging
        self._parts = parts
        self.say, self.cancel, self.quarantine = owner.say, owner.cancel, owner.quarantine

    def reserve(self, first: int, count: int) -> list[int]:
        """Of the group whose blocks these are."""
        return self._owner.tiers.reserve(self._parts.place(first)[0], count)

    def pull(self, receiving: Receiving, pull: Pull, attempt: int) -> bool:
        """As the other instance has them."""
        return self._owner.pull(receiving, pull, attempt, self._staging)

    def check(self, receiving: Receiving, pull: Pull) -> None:
        """In a thread: how many leading blocks are what the other instance had."""
        staging = self._staging
        ranks = staging.ranks if staging else None

        def count() -> None:
            found = self._owner.checksums(pull.targets, ranks)
            pairs = zip(found, pull.checksums, strict=True)
            wrong = (i for i, (here, there) in enumerate(pairs) if here != there)
            num_good = next(wrong, len(pull.targets))
            if staging:
                for block in pull.targets[:num_good]:
                    staging.move(block)
                for block in pull.targets:
                    staging.free(block)
            self._owner.call(lambda: receiving.checked(pull, num_good))

        self._owner.in_thread(count)

    def release(self, blocks: list[int]) -> None:
        """Not before the thread has moved what it was told to move there."""
        if self._staging:
            self._owner.in_thread(lambda: self._owner.call(lambda: self._owner.end_leases(blocks)))
        else:
            self._owner.end_leases(blocks)

    def adopt(self, first: int, blocks: list[int]) -> None:
        """Into the prefix cache."""
        kv, (group, index) = self._owner.kv, self._parts.place(first)
        blocks = self._parts.within_group(first, blocks)
        if not group:
            kv.prefix.adopt(self._table, index, blocks)
            return
        entries = kv.prefix.match(self._table, index + len(blocks))[index:]
        for entry, block in zip(entries, blocks, strict=False):  # of others the tokens are unknown
            kv.bounded[group - 1].adopt(entry, block)

    def take_first(self, note: First) -> None:
        """For its client. Of several answers to one prompt each has a first token of its own."""
        if self._request.sampling.n == 1:
            self._owner.take_first(self._request.request_id, note)

    def finish(self, failure: str) -> None:
        """The request goes on."""
        self._owner.finish(self._request.request_id, failure)


class Handovers:
    """See the module. One thread calls, but for `set_role` and `count`."""

    def __init__(
        self,
        config: EngineConfig,
        infos: list[WorkerInfo],
        plan: CachePlan,
        make_transport: Callable[[TransportOptions], KVTransport],
    ) -> None:
        """CapabilityError where there is no host tier; ConfigError without a secret."""
        asked = config.handover
        can = getattr(make_transport, "capabilities", TransportCapabilities())
        self._on_device = can.device_memory
        words = f"--kv-transport {asked.transport}"
        if not infos[0].bytes_per_block:
            raise CapabilityError(
                f"{words} counts a prompt's blocks by layers that need every token, and this model "
                "has none; leave it out"
            )
        self._memory = HostMemory(len(infos), plan, words, on_device=self._on_device)
        self.paths = self._memory.paths  # where each rank's host tier is to lie
        # The prefix cache's model_identity: instances with other ranks have the same.
        self.identity = identity_of(config, infos, with_layout=False)
        self._layout, self._stagings = layout_of(config, infos), dict[Layout, Staging]()
        self._vocab_size = infos[0].vocab_size
        self._digest = hashlib.sha256(self.identity.encode()).hexdigest()
        self._make_transport, self._timeout_s = make_transport, asked.timeout_s
        self._options = TransportOptions(
            secret=shared_secret(), model_revision=self._digest, address=asked.address
        )
        self._role = self._next_role = InstanceRole(asked.role)
        self.report = f"KV handover: transport {asked.transport}, role {asked.role}"
        self._sending: dict[str, Sending] = {}
        self._receiving: dict[str, Receiving] = {}
        self._by_request: dict[str, str] = {}  # request id to the name of its handover
        # Who wants this block of this group of layers.
        self._by_key: dict[tuple[int, bytes], list[tuple[Sending, int]]] = {}
        self._early: dict[str, tuple[str, Want, float]] = {}  # peer, what it wants, until when
        self._beat_s = 0.0  # when those are told again that they are not forgotten
        self._greeted: set[str] = set()
        self._pulls: dict[int, tuple[Receiving, Pull, set[int]]] = {}  # by transfer
        self._ids = itertools.count(1)
        self._leases = Counter[int]()  # of host blocks that other instances may read
        self._noted: dict[int, list[tuple[int, CacheEntry, int]]] = {}  # by step
        self._last_planned = self._last_settled = -1
        self._computed: dict[str, int] = {}  # prompts, and the step that copies their last block
        self._quarantine: list[tuple[str, list[int]]] = []
        self._finished: list[tuple[str, RequestOutputDelta | None]] = []
        self._told: set[str] = set()  # failures that are in the log
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_sums = 0  # checksums that the thread has yet to compute
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.sums = run_threads("fd-kv-sums", 1)
        self._num_sent = self._num_taken = self._num_failures = 0

    def open(self, scheduler: BatchScheduler) -> None:
        """The ranks have their host tiers, and this is the engine's batch scheduler."""
        self._scheduler, self.kv = scheduler, scheduler.kv
        self._memory.open(scheduler.kv)
        self.tiers = Tiers(scheduler.kv.tiers)
        sizes = [sum(size for _, size in ranks) for ranks in self._memory.groups]
        most_bytes = MAX_DEVICE_HAVE_BYTES if self._on_device else MAX_HAVE_BYTES
        self._most = [max(1, min(messages.MAX_BLOCKS, most_bytes // size)) for size in sizes]
        self._open_transport()

    @property
    def is_awaited(self) -> bool:
        """Whether `ready` has something to do, or to wait for."""
        is_busy = self._receiving or self._sending or self._early or self._quarantine
        has_more = self._finished or self._num_sums or not self._done.empty()
        return bool(is_busy or has_more or self._role != self._next_role)

    def prepare(self, request: Request) -> Request:
        """The request as the engine gets it: of a prompt that another instance answers only the
        first token is wanted here. InvalidRequest for an order that makes no sense."""
        if not request.handover or read_order(request.handover).role is InstanceRole.DECODE:
            return request
        sampling, limit = request.sampling, min(1, request.sampling.max_tokens or 1)
        sampling = msgspec.structs.replace(
            sampling, n=1, max_tokens=limit, min_tokens=min(limit, sampling.min_tokens)
        )
        return msgspec.structs.replace(request, sampling=sampling)

    def fetch(self, request: Request, table: BlockTable, token_ids: list[int]) -> bool:
        """A request was queued. True: it waits for another instance, and `ready` will name it."""
        if not request.handover or self._role != self._next_role:
            return False
        order = read_order(request.handover)
        entries = self.kv.match(table, token_ids).entries
        if order.name in self._sending or order.name in self._receiving or not table.keys:
            return False
        known = self.kv.prefix.match(table, len(table.keys))
        if order.role is InstanceRole.PREFILL:
            self._send(order.name, request, table, known)
            return False
        is_all = len(entries) == len(table.keys)  # and of every group what it needs
        return self._receive(order, request, table, None if is_all else len(known))

    def ready(self, wait_s: float = 0.0) -> list[tuple[str, RequestOutputDelta | None]]:
        """Take in what happened: first tokens of requests that wait on, and, with None, requests
        that wait no more. With `wait_s`: wait at most so long for something."""
        if wait_s:
            self._look_after(time.monotonic())  # what a step has changed is no event
            if not self._finished:
                connection.wait([self._transport.fileno(), self._wake], wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._take_events()
        self._look_after(time.monotonic())
        finished, self._finished = self._finished, []
        return finished

    def wake(self) -> None:
        """End a wait of `ready`; from any thread."""
        os.eventfd_write(self._wake, 1)

    def note(self, step_id: int) -> None:
        """A step was planned; its copies may bring wanted blocks to host memory."""
        self._last_planned = step_id
        if written := self.tiers.take_written():
            self._noted[step_id] = written

    def settle(self, step_id: int, *, is_done: bool) -> None:
        """The step was done, or failed. What it left in host memory is there for others."""
        self._last_settled = step_id
        to_sum: list[tuple[int, list[tuple[Sending, int]]]] = []
        written = self._noted.pop(step_id, ())
        held = Counter(self.tiers.place(block)[0] for block in self._leases if written)
        for group, entry, block in written:
            pairs = self._by_key.get((group, entry.key), ())
            wanted = [pair for pair in pairs if not pair[0].is_over]
            is_full = held[group] >= self.tiers.all[group].num_blocks * MAX_HELD_SHARE
            if is_done and wanted and (block in self._leases or not is_full):
                held[group] += block not in self._leases
                self._leases[block] += len(wanted)
                for sending, _ in wanted:
                    sending.num_checked += 1
                to_sum.append((block, wanted))
            elif block not in self._leases:
                self.tiers.end_lease(block)
        most = self._most[0]
        for first in range(0, len(to_sum), most):
            self.in_thread(partial(self._sum_all, to_sum[first : first + most]))
        if not is_done:
            for sending in self._sending.values():
                sending.fail("a step failed there")

    def told(self, outputs: list[Any]) -> None:
        """What clients are told: of prompts for others it is the first token."""
        if not self._sending:
            return
        self._take_events()  # who wants the token may have said so during the step
        for delta in outputs:
            if not isinstance(delta, RequestOutputDelta):
                continue
            sending = self._sending.get(self._by_request.get(delta.request_id, ""))
            if sending is None:
                continue
            first = delta.sequences[0] if delta.sequences else None
            if delta.error or first is None or not first.token_ids:
                sending.fail("it failed there")
            else:
                del self._by_request[delta.request_id]
                token = SequenceDelta(token_ids=first.token_ids, logprobs=first.logprobs)
                if _fits(sending.name, token):
                    sending.first(token, delta.num_cached_tokens)
                self._computed[sending.name] = self._last_planned + self.kv.has_copies

    def set_role(self, role: InstanceRole) -> None:
        """From any thread. Handovers under way end first; then peers need a new ticket."""
        self.call(lambda: setattr(self, "_next_role", role))

    def count(self, stats: EngineStats) -> None:
        """Fill in what is counted here; from any thread."""
        stats.kv_handed_over_total = self._num_sent
        stats.kv_taken_over_total = self._num_taken
        stats.kv_handover_failures_total = self._num_failures
        role, ticket = self._role, self._ticket
        if role == self._next_role:
            stats.kv_role, stats.kv_ticket = role.value, ticket

    def close(self) -> None:
        """Tell the others, as far as that is quick, and close the transport. Idempotent."""
        self.sums.put(None)
        if transport := getattr(self, "_transport", None):
            for receiving in list(self._receiving.values()):
                receiving.give_up("the instance ends")
            transport.close()
        self._memory.close()

    # For Sending and Receiving.

    def say(self, peer: str, note: msgspec.Struct) -> None:
        """Send a note. A peer that takes none is lost."""
        try:
            self._transport.note(peer, messages.encode(note))
        except FastDeployError as error:
            logger.debug("no note to %s: %s", peer, error)
            self.call(partial(self._lose, peer))

    def pull(self, receiving: Receiving, pull: Pull, attempt: int, staging: Staging | None) -> bool:
        """One transfer, or several where the transport takes fewer regions at once."""
        most = self._transport.capabilities.max_regions
        group = receiving.parts.place(pull.first)[0]
        regions = _region_ids(staging.layout if staging else self._layout, group)
        targets = receiving.parts.within_group(pull.first, pull.targets)
        parts = [regions[i : i + most] for i in range(0, len(regions), most)]
        ids = {next(self._ids) for _ in parts}
        try:
            for transfer_id, part in zip(sorted(ids), parts, strict=True):
                plan = TransferPlan(
                    transfer_id, attempt, part, pull.sources, targets, self._timeout_s
                )
                self._transport.submit(receiving.peer, plan)
                self._pulls[transfer_id] = receiving, pull, ids
        except FastDeployError as error:
            logger.debug("no transfer from %s: %s", receiving.peer, error)
            self.cancel(pull)
            return False
        return True

    def cancel(self, pull: Pull) -> bool:
        """Stop all transfers of a pull; whether nothing can arrive any more."""
        ids = [number for number, entry in self._pulls.items() if entry[1] is pull]
        for number in ids:
            del self._pulls[number]
            pull.is_unsafe |= self._transport.cancel(number) is CancelResult.UNSAFE
        return not pull.is_unsafe

    def quarantine(self, peer: str, blocks: list[int]) -> None:
        """Keep blocks until the peer is fenced."""
        self._quarantine.append((peer, blocks))

    def release(self, blocks: list[int]) -> None:
        """One instance less may read these."""
        for block in blocks:
            self._leases[block] -= 1
            if not self._leases[block]:
                del self._leases[block]
                self.tiers.end_lease(block)

    def end_leases(self, blocks: Iterable[int]) -> None:
        """Blocks that were reserved to be filled."""
        for block in blocks:
            self.tiers.end_lease(block)

    def take_first(self, request_id: str, note: First) -> None:
        """The first token of a request that waits."""
        ids = note.token.token_ids
        if len(ids) == 1 and 0 <= ids[0] < self._vocab_size:
            cached = note.num_cached_tokens
            delta = RequestOutputDelta(
                request_id=request_id, num_cached_tokens=cached, sequences=[note.token]
            )
            self._finished.append((request_id, delta))

    def finish(self, request_id: str, failure: str) -> None:
        """A request waits no more."""
        if self._by_request.pop(request_id, None) is None:
            return  # it has ended
        self._finished.append((request_id, None))
        if not failure:
            self._num_taken += 1
        else:
            self._fail(failure)

    def call(self, function: Callable[[], None]) -> None:
        """Have the engine's thread call it; from any thread."""
        self._done.put(function)
        self.wake()

    def in_thread(self, task: Callable[[], None]) -> None:
        """Have the thread do something that ends with `call`, after what it has to do already."""
        self._num_sums += 1

        def do() -> None:
            task()
            self.call(self._one_done)

        self.sums.put(do)

    def checksums(
        self, blocks: Sequence[int], ranks: list[tuple[memoryview, int]] | None = None
    ) -> list[int]:
        """CRC-32C of each block on all ranks, of the host tier or of other memory like it. Where
        blocks lie in device memory the transport computes sums."""
        transport = self._transport
        if isinstance(transport, DeviceSums):
            totals = [0] * len(blocks)
            for region_id in _region_ids(self._layout):
                found = transport.checksums(region_id, blocks)
                pairs = zip(totals, found, strict=True)
                totals = [total ^ one + region_id & 0xFFFFFFFF for total, one in pairs]
            return totals
        if ranks:
            return [_crc(parts_of(ranks, block)) for block in blocks]
        places = map(self.tiers.place, blocks)
        return [_crc(parts_of(self._memory.groups[group], block)) for group, block in places]

    # Our own.

    def _open_transport(self) -> None:
        self._transport = self._make_transport(self._options)
        for group, ranks in enumerate(self._memory.groups):
            self._register(self._layout, ranks, group, is_shown=True)
        descriptor = self._transport.descriptor()
        for layout, staging in self._stagings.items():
            self._register(layout, staging.ranks)
        self._hello = messages.encode(Hello(descriptor))
        ticket = Ticket(self._transport.name, descriptor, self._layout)
        self._ticket = make_ticket(self._options.secret, ticket)

    def _register(
        self,
        layout: Layout,
        ranks: list[tuple[Any, int]],
        group: int = 0,
        *,
        is_shown: bool = False,
    ) -> None:
        """is_shown: peers may map the memory itself, where a transport can do that."""
        name = f"{self._digest}.{layout.digest}.{group}"
        self._transport.register(
            [
                Region(
                    *(number, _whole(view, size), size, f"{name}.{rank}"),
                    file=self._memory.file(rank, group) if is_shown else -1,
                )
                for rank, (number, (view, size)) in enumerate(
                    zip(_region_ids(layout, group), ranks, strict=True)
                )
            ]
        )

    def _staging_for(self, layout: Layout) -> Staging | None:
        """Where blocks of a layout arrive that is not ours; CapabilityError if they are of no use
        here."""
        if layout == self._layout:
            return None
        if self._on_device:
            raise CapabilityError("instances whose blocks stay on devices need equally many ranks")
        if self.kv.bounded:
            raise CapabilityError(
                "instances of a model with windows, chunks or states need equally many ranks"
            )
        if layout not in self._stagings:
            if len(self._stagings) >= MAX_LAYOUTS:
                raise CapabilityError(f"instances have more than {MAX_LAYOUTS} numbers of ranks")
            staging = Staging(layout, self._layout, self._memory.ranks)
            self._register(layout, staging.ranks)
            self._stagings[layout] = staging
        return self._stagings[layout]

    def _reopen(self) -> None:
        """Nothing of before can arrive any more, and peers of before cannot connect again."""
        for name in [*self._greeted, *(entry[0] for entry in self._early.values())]:
            self._lose(name)
        self._transport.close()
        for _, blocks in self._quarantine:
            self.end_leases(blocks)
        self._quarantine, self._pulls = [], {}
        self._greeted.clear()
        self._early.clear()
        self._open_transport()

    def _send(
        self, name: str, request: Request, table: BlockTable, entries: list[CacheEntry]
    ) -> None:
        parts, host = self._parts(table), self.kv.host
        sending = Sending(name, table.keys.copy(), self, time.monotonic(), parts)
        self._sending[name], self._by_request[request.request_id] = sending, name
        for number in range(parts.total):
            self._by_key.setdefault(_wanted(sending, number), []).append((sending, number))
        self.tiers.write_through(True)
        for entry in entries:  # others are written as they are computed
            if entry.block is not None or entry in host:
                host.write_through(entry, -1 if entry.block is None else entry.block)
        for group in self.kv.bounded:
            for index in group.needed(len(table.keys)):
                if index < len(entries):
                    group.write_through(entries[index])
        if (early := self._early.pop(name, None)) is not None:
            sending.want(early[0], early[1], time.monotonic())

    def _parts(self, table: BlockTable) -> Parts:
        count = len(table.keys)
        spans = [range(count), *(group.needed(count) for group in self.kv.bounded)]
        return Parts(spans, self._most, self.tiers.bases)

    def _receive(
        self, order: Order, request: Request, table: BlockTable, first: int | None
    ) -> bool:
        """first: the first number that is not known; None: all is there."""
        parts = self._parts(table)
        try:
            ticket = read_ticket(self._options.secret, self._transport.name, order.ticket)
            staging = self._staging_for(ticket.layout)
            peer = self._transport.connect(ticket.descriptor)
        except FastDeployError as error:
            self._fail(f"cannot connect: {error}")
            return False
        self._greeted.add(peer)
        # Each time: its connection to here may have ended while the one from here has not.
        with contextlib.suppress(FastDeployError):  # it is lost then, which an event says
            self._transport.note(peer, self._hello)
        first = parts.total if first is None else first
        want = Want(order.name, request.attempt + 1, first, parts.total, table.keys[-1])
        timeout_s = min(self._timeout_s, request.deadline_s or self._timeout_s)
        world = _Incoming(self, request, table, parts, staging)
        self._by_request[request.request_id] = order.name
        self._receiving[order.name] = Receiving(
            order.name, peer, want, world, time.monotonic(), timeout_s, parts
        )
        return True

    def _sum_all(self, blocks: list[tuple[int, list[tuple[Sending, int]]]]) -> None:
        """In a thread: the checksums of blocks, each with the sendings that want it."""
        checksums = self.checksums([block for block, _ in blocks])

        def add() -> None:
            for (block, wanted), checksum in zip(blocks, checksums, strict=True):
                for sending, number in wanted:
                    sending.num_checked -= 1
                    sending.add(number, block, checksum)

        self.call(add)

    def _one_done(self) -> None:
        self._num_sums -= 1

    def _take_events(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._done.get_nowait()()
        for event in self._transport.poll():
            self._on_event(event)

    def _on_event(self, event: TransferEvent) -> None:
        kind, now = event.kind, time.monotonic()
        if kind is TransferEventKind.NOTE:
            try:
                note = messages.decode(event.note)
            except DECODE_ERRORS as error:
                self._warn(f"a note is unreadable: {error}")
                return
            self._on_note(event.peer, note, now)
        elif kind is TransferEventKind.PEER_DOWN:
            logger.info("KV handover: %s is gone: %s", event.peer, event.reason)
            self._lose(event.peer)
        elif (found := self._pulls.get(event.transfer_id)) is not None:
            receiving, pull, ids = found
            if kind is TransferEventKind.FAILED:
                self.cancel(pull)
                receiving.pulled(pull, event.reason, is_retryable=event.retryable)
                return
            receiving.moved(now)
            if kind is TransferEventKind.PROGRESS:
                return
            del self._pulls[event.transfer_id]
            if ids.isdisjoint(self._pulls):
                receiving.pulled(pull)

    def _on_note(self, peer: str, note: messages.Note, now: float) -> None:
        if isinstance(note, Hello):
            try:
                is_own = self._transport.connect(note.descriptor) == peer
            except FastDeployError as error:
                is_own = False
                logger.debug("%s names no way back: %s", peer, error)
            if is_own:
                self._greeted.add(peer)
            return
        sending, receiving = self._sending.get(note.name), self._receiving.get(note.name)
        if isinstance(note, Want):
            if sending is not None:
                sending.want(peer, note, now)
            elif self._role != self._next_role or len(self._early) >= MAX_EARLY:
                self.say(peer, Abort(note.name, note.attempt, "it is draining or full"))
            else:
                self._early[note.name] = peer, note, now + self._timeout_s * EARLY_SHARE
        elif receiving is not None and peer == receiving.peer:
            if isinstance(note, Have):
                receiving.have(note, now)
            elif isinstance(note, First):
                receiving.first(note, now)
            elif isinstance(note, Commit):
                receiving.commit(note, now)
            elif isinstance(note, Abort):
                receiving.abort(note)
            elif isinstance(note, Alive):
                receiving.hear(note, now)
        elif isinstance(note, Abort):
            if sending is not None:
                sending.abort(peer, note.attempt)
            else:
                self._early.pop(note.name, None)
                self.say(peer, Aborted(note.name, note.attempt))
        elif sending is not None:
            if isinstance(note, Accept):
                sending.accept(peer, note.attempt)
            elif isinstance(note, Aborted):
                sending.aborted(peer, note.attempt)
            elif isinstance(note, Alive):
                sending.hear(peer, note.attempt, now)

    def _look_after(self, now: float) -> None:
        """Deadlines, ends, and what waits for something that no event says."""
        for request_id, name in list(self._by_request.items()):
            if self._scheduler.leader(request_id) is not None:
                continue
            if (receiving := self._receiving.get(name)) is not None:
                receiving.end()
            elif (sending := self._sending.get(name)) is not None:
                sending.fail("the request has ended there")
            self._by_request.pop(request_id, None)
        for name, last in list(self._computed.items()):
            if last <= self._last_settled and not self._sending[name].num_checked:
                self._sending[name].commit()
                del self._computed[name]
        for sending in self._sending.values():
            sending.tick(now)
        for receiving in list(self._receiving.values()):
            receiving.tick(now)
        is_due = now >= self._beat_s
        self._beat_s = now + BEAT_S if is_due else self._beat_s
        for name, (peer, want, end_s) in list(self._early.items()):
            if now < end_s:
                if is_due:
                    self.say(peer, Alive(name, want.attempt))
            else:
                del self._early[name]
                self.say(peer, Abort(name, want.attempt, "the prompt has not come there"))
        self._forget_ended()
        self._quarantine = [one for one in self._quarantine if not self._is_fenced(*one)]
        num_kept = sum(len(blocks) for _, blocks in self._quarantine)
        is_idle = not (self._sending or self._receiving)
        if num_kept > self.tiers.num_blocks * MAX_QUARANTINE_SHARE:
            self._warn("too many blocks may still be written to; the transport is opened anew")
            self._reopen()
        elif self._role != self._next_role and is_idle:
            self._reopen()
            logger.info("KV handover: role %s, before %s", self._next_role, self._role)
            self._role = self._next_role

    def _forget_ended(self) -> None:
        for name, sending in list(self._sending.items()):
            if sending.is_over:
                del self._sending[name]
                self._computed.pop(name, None)
                self._num_sent += sending.is_accepted
                self._by_request = {r: n for r, n in self._by_request.items() if n != name}
                for number in range(sending.parts.total):
                    key = _wanted(sending, number)
                    left = [pair for pair in self._by_key.pop(key) if pair[0] is not sending]
                    if left:
                        self._by_key[key] = left
        self.tiers.write_through(bool(self._sending))
        self._receiving = {n: r for n, r in self._receiving.items() if not r.is_over}

    def _is_fenced(self, peer: str, blocks: list[int]) -> bool:
        if not self._transport.fence(peer):
            return False
        self.end_leases(blocks)
        self._lose(peer)
        return True

    def _lose(self, peer: str) -> None:
        """A peer is gone. It may come back, and is greeted again then."""
        self._greeted.discard(peer)
        for sending in self._sending.values():
            sending.lose(peer)
        for receiving in list(self._receiving.values()):
            receiving.lose(peer)

    def _fail(self, reason: str) -> None:
        self._num_failures += 1
        self._warn(f"{reason}; the prompt is computed here")

    def _warn(self, text: str) -> None:
        if text not in self._told and len(self._told) < 64:
            self._told.add(text)
            logger.warning("KV handover: %s (further ones of the kind are not logged)", text)


def _wanted(sending: Sending, number: int) -> tuple[int, bytes]:
    group, index = sending.parts.place(number)
    return group, sending.keys[index]


def _region_ids(layout: Layout, group: int = 0) -> list[int]:
    """Of its ranks, with each transport: those of another layout or group are others."""
    digest = hashlib.sha256(f"{layout.digest} {group}".encode()).hexdigest()
    first = int(digest[:6], 16) << 8
    return [first + rank for rank in range(layout.num_ranks)]


def _crc(parts: list[memoryview]) -> int:
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value


def _whole(memory: Any, size: int) -> Any:
    """As much of host memory as whole blocks take."""
    if not isinstance(memory, memoryview):
        return memory
    return memory[: len(memory) // size * size]


def _fits(name: str, first: SequenceDelta) -> bool:
    """Whether a first token goes into a note: all log-probabilities of a vocabulary do not."""
    note = First(name, 2**31, first, 2**31)
    return len(messages.encode(note)) <= MAX_NOTE_BYTES
