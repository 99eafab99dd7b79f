"""What a worker remembers of its sequences: one slot each, on the host and on the device.

The device's entries are what counts. After every step in which a sequence samples they say how many
of its tokens are computed, which token is the newest, and which drafts come next; the next step
reads them there without the host. The host learns the same later, from the results. Only what the
device cannot know is sent to it: rows, new blocks, and sequences that have not sampled yet.
A step is vector work over the slots of the batch; nothing is done per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from fastdeploy_core.contracts.device import PostingDevice
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.memory.postbox import Postbox
from fastdeploy_core.memory.transfers import Uploads
from fastdeploy_core.types import BatchRows, NewSequence, SchedulerOutput

from .step import StepRows

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.model import Retention
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

Update: TypeAlias = "tuple[Tensor, np.ndarray | None, np.ndarray]"
# What the device's drafts of a slot are: for the next step, or those of an earlier one.
NONE, NEW, OLD = 0, 1, 2
MOST_LATER = 8  # updates that are held back until a step reads them


class SlotState(Protocol):
    """Anything that remembers something per slot."""

    def reset(self, slot: int) -> None:
        """Forget the slot's sequence entirely."""
        ...


@dataclass(slots=True)
class DeviceState:
    """The device's entries, one per slot and a last one for padding rows; int64 but for tables and
    history, which are int32. See the operations of decode steps in contracts/ops/decode.py."""

    tables: Tensor  # [S, W]
    num_computed: Tensor  # [S]
    newest: Tensor  # [S]
    drafts: Tensor  # [S, k]
    num_drafts: Tensor  # [S]
    room: Tensor  # [S] tokens that the slot's blocks hold
    rows: Tensor  # [S - 1] the slots of a captured step's rows; the last slot in place of none
    limit: Tensor  # [1] drafts that a row may have
    turn: Tensor  # [1] captured steps so far
    history: Tensor | None  # [S, L] all tokens, for drafters that read them; see `Slots.catch_up`


class Slots:
    """Slots of up to max_num_seqs sequences."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        config: EngineConfig,
        vocab_size: int,
        parts: Iterable[SlotState] = (),
        *,
        max_decodes: int = 1,
        keeps_history: bool = False,
        is_read: bool = False,
    ) -> None:
        """parts: what else is to be reset with a slot. max_decodes: see WorkerInfo. keeps_history:
        see DraftBatch.history. is_read: captured steps or a drafter read the device's entries."""
        speculative, size = config.speculative, config.batch.max_num_seqs
        self.max_num_seqs, self.max_model_len = size, config.model.max_model_len
        self.block_size = config.cache.block_size
        self.max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self._xp, self._device, self._uploads = device.xp, device, Uploads(device)
        self._parts, self._is_read = tuple(parts), is_read
        max_blocks = -(-(self.max_model_len + self.max_drafts) // self.block_size) + 1
        # Host entries, one row per slot. Zeroed pages cost nothing until they are written.
        longest = self.max_model_len + 1 + max_decodes * (1 + self.max_drafts)
        self.token_ids = np.zeros((size, longest), dtype=np.int32)
        self.block_tables = np.zeros((size, max_blocks), dtype=np.int32)
        # The same of each bounded group of layers, whose entries in front of what it needs may be
        # anybody's.
        self.more_tables: dict[Retention, np.ndarray] = {}
        self.num_blocks, self.room, self.num_prompt, self.num_known, self.owner, self.num_drafts = (
            np.zeros(size, dtype=np.int64) for _ in range(6)
        )  # owner: the version at which its sequence could come; num_known: tokens the host knows
        self.draft_ids = np.zeros((size, self.max_drafts), dtype=np.int64)  # after the known tokens
        self.seq_ids = np.full(size, -1, dtype=np.int64)
        self.slot_of: dict[int, int] = {}
        self._free = list(range(size))  # a heap: low slots first keep batches dense
        # The rows of the step before; their arrays are kept while they stay, so that others see at
        # a glance that they did.
        self._last: StepRows | None = None
        self._last_ids = np.zeros(0, dtype=np.int64)
        # Counts that were found to be alike, drafts of each row, decodes: seldom others come next.
        self._alike: tuple[np.ndarray | None, int, int] = (None, 0, 1)
        self._num_gone = 0  # sequences that left since then
        self._uniform: dict[tuple[int, int, int], StepRows] = {}
        # The device's entries, and what the host has told it.
        self._make_state(max_blocks, max_decodes, keeps_history=keeps_history)
        self._keep_drafts, self._finish = kernels["keep_drafts"], kernels["finish_decode"]
        self._append, self._vocab_size = kernels["append_history"], vocab_size
        self._no_drafts: Tensor = None  # in place of drafts that shall all be refused
        if speculative is not None and speculative.benchmark_mode:
            self._no_drafts = self.state.drafts - 1
        # By slot: whether the device knows count and newest token, whether its history is complete,
        # how many blocks it knows, what its drafts are; has_drafts: any slot has or just had some.
        self.is_held, self._has_history = (np.zeros(size, dtype=bool) for _ in range(2))
        self._num_sent, self._drafts_are = (np.zeros(size, dtype=np.int64) for _ in range(2))
        self._sent: tuple[np.ndarray | None, int, int] = (None, 0, 0)
        self._sent_limit, self.has_drafts = 0, False
        self._later: list[Update] = []  # for which the next step that reads them is early enough
        self._sent_rows = np.full(size, size, dtype=np.int64)
        self._even_offsets: dict[int, tuple[np.ndarray, Tensor]] = {}
        self.version = 0  # grows whenever a sequence, its blocks or its place changed

    def _make_state(self, max_blocks: int, max_decodes: int, *, keeps_history: bool) -> None:
        xp, device, num_slots = self._xp, self._device, self.max_num_seqs + 1

        def zeros(*shape: int, dtype: object = xp.int64) -> Tensor:
            return xp.zeros(shape, dtype=dtype, device=device.device)

        history: Tensor | None = None
        if keeps_history:  # what has ended may go on for two steps
            longest = self.max_model_len + self.max_drafts + 2 + 2 * max_decodes
            history = zeros(num_slots, longest, dtype=xp.int32)
        self.state = DeviceState(
            tables=zeros(num_slots, max_blocks, dtype=xp.int32),
            num_computed=zeros(num_slots),
            newest=zeros(num_slots),
            drafts=zeros(num_slots, self.max_drafts),
            num_drafts=zeros(num_slots),
            room=zeros(num_slots),
            rows=zeros(self.max_num_seqs) + self.max_num_seqs,
            limit=zeros(1),
            turn=zeros(1),
            history=history,
        )
        # Of each group of layers, on the device and here.
        self.tables: list[tuple[Tensor, np.ndarray]] = [(self.state.tables, self.block_tables)]
        self.postbox: Postbox | None = None
        if isinstance(device, PostingDevice):
            sizes = (self.max_num_seqs, self.max_drafts, max_decodes)
            self.postbox = Postbox(device, self.state.turn, *sizes)

    def even_offsets(self, num_rows: int) -> tuple[np.ndarray, Tensor]:
        """0, 1, ... num_rows: the same for every step of one token in each of so many rows."""
        if num_rows not in self._even_offsets:
            host = np.arange(num_rows + 1, dtype=np.int32)
            self._even_offsets[num_rows] = (host, self._device.to_device(host))
        return self._even_offsets[num_rows]

    def add_groups(self, rules: Iterable[Retention]) -> None:
        """Layers of these rules have block tables of their own."""
        for rule in rules:
            self.more_tables[rule] = np.zeros_like(self.block_tables)
            self.tables.append((self._xp.zeros_like(self.state.tables), self.more_tables[rule]))

    # -- sequences --------------------------------------------------------------------------------

    def add(self, new: NewSequence) -> int:
        """Give a sequence a slot. A sequence that is already here starts anew."""
        if new.seq_id in self.slot_of:
            self.remove(new.seq_id)
        if not self._free:
            raise WorkerError(
                f"sequence {new.seq_id} does not fit: all {self.max_num_seqs} slots are taken"
            )
        length = len(new.token_ids)
        num_blocks = len(new.block_ids) // len(self.tables)
        if length > self.max_model_len or num_blocks > self.block_tables.shape[1]:
            raise WorkerError(
                f"sequence {new.seq_id} has {length} tokens and {num_blocks} blocks; this worker "
                f"holds {self.max_model_len} tokens and {self.block_tables.shape[1]} blocks each"
            )
        slot = heapq.heappop(self._free)
        self.slot_of[new.seq_id] = slot
        self.seq_ids[slot] = new.seq_id
        self.token_ids[slot, :length] = new.token_ids
        self.num_prompt[slot], self.num_known[slot] = new.num_prompt_tokens, length
        self._append_blocks(slot, new.block_ids)
        return slot

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        slot = self.slot_of.pop(seq_id, None)
        if slot is not None:
            self._num_gone += 1
            self.reset(slot)
            heapq.heappush(self._free, slot)

    def reset(self, slot: int) -> None:
        """The one place where a slot is cleaned: buffers, and parts with state per slot."""
        if self._is_read and self._drafts_are[slot]:
            self._later.append((self.state.num_drafts, np.array([slot]), np.array([0])))
        self.token_ids[slot] = self.block_tables[slot] = self.draft_ids[slot] = 0
        for table in self.more_tables.values():
            table[slot] = 0
        self.num_blocks[slot] = self.num_prompt[slot] = self.num_known[slot] = self.room[slot] = 0
        self.num_drafts[slot] = self._num_sent[slot] = self._drafts_are[slot] = 0
        self.is_held[slot] = self._has_history[slot] = False
        self.seq_ids[slot] = -1
        self.version += 1
        self.owner[slot] = self.version
        for part in self._parts:
            part.reset(slot)

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        first, num_groups = int(self.num_blocks[slot]), len(self.tables)
        last = first + len(block_ids) // num_groups
        if last > self.block_tables.shape[1]:
            raise WorkerError(
                f"sequence {self.seq_ids[slot]} would get {last} blocks; "
                f"{self.block_tables.shape[1]} are the most for {self.max_model_len} tokens"
            )
        if len(block_ids) == 1:  # as nearly always; a slice takes numpy several times as long
            self.block_tables[slot, first] = block_ids[0]
        else:
            for number, (_, table) in enumerate(self.tables):  # numbers of all groups alternate
                table[slot, first:last] = block_ids[number::num_groups]
        self.num_blocks[slot] = last
        self.room[slot] = min(last * self.block_size, self.max_model_len)
        self.version += 1

    def output_tokens(self, slot: int) -> np.ndarray:
        """What the sequence generated, as far as the host knows; a view."""
        return self.token_ids[slot, self.num_prompt[slot] : self.num_known[slot]]

    def stays(self, slots: np.ndarray, version: int) -> np.ndarray | None:
        """[B] bool: whether each slot has the sequence that it had at that version; None: all."""
        if version == self.version:
            return None
        stays: np.ndarray = self.owner[slots] <= version
        return None if np.count_nonzero(stays) == slots.size else stays

    def learn(
        self, slots: np.ndarray, version: int, tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """The host learns the next tokens of each slot that has the sequence of that version:
        `counts`, [B], of each, one slot's after the other's in `tokens`, [N]."""
        stays = self.stays(slots, version)
        if stays is not None:
            slots, tokens, counts = slots[stays], tokens[stays.repeat(counts)], counts[stays]
        known = self.num_known[slots]
        begins = known - (counts.cumsum() - counts)
        where = begins.repeat(counts) + np.arange(tokens.size)
        self.token_ids[slots.repeat(counts), where] = tokens
        # What has come to its end goes on until that is known.
        self.num_known[slots] = np.minimum(known + counts, self.max_model_len + 1)

    def learn_one(self, slots: np.ndarray, version: int, tokens: np.ndarray) -> None:
        """The same of the next token of each slot, [B]."""
        stays = self.stays(slots, version)
        if stays is not None:
            slots, tokens = slots[stays], tokens[stays]
        known = self.num_known[slots]
        self.token_ids[slots, known] = tokens
        self.num_known[slots] = known + 1

    # -- a step's rows ----------------------------------------------------------------------------

    def rows(self, step: SchedulerOutput) -> StepRows:
        """Read one step's rows, and take over its new blocks."""
        message, last, num_decodes = step.rows, self._last, step.num_decodes
        if message is None:
            is_sampled = last is not None and (last.is_decode or last.samples.all())
            if last is None or last.width > 1 or not is_sampled or self._is_missing(last):
                raise WorkerError("a step is inconsistent: it goes on with rows that cannot")
            slots = last.slots
            rows = self.decodes(slots, last.seq_lens, 0, num_decodes)
        else:
            slots = self._slots_of(message.seq_ids)
            rows = self._read(message, slots, num_decodes)
        self._num_gone = 0
        for row, block_ids in step.new_block_ids.items():
            self._append_blocks(int(slots[row]), block_ids)
        self._check(rows)
        self._last = rows
        return rows

    def _slots_of(self, seq_ids: np.ndarray) -> np.ndarray:
        last = self._last
        if last is not None and seq_ids is self._last_ids and not self._is_missing(last):
            return last.slots
        self._last_ids = seq_ids
        try:
            slots = [self.slot_of[seq_id] for seq_id in seq_ids.tolist()]
        except KeyError as error:
            raise WorkerError(
                f"a step names sequence {error}, which this worker was never given"
            ) from None
        if len(set(slots)) != len(slots):
            raise WorkerError(f"a step is inconsistent: it names a sequence twice, slots {slots}")
        return np.array(slots, dtype=np.int64)

    def _is_missing(self, last: StepRows) -> bool:
        """Whether one of the last step's rows is not where it was any more."""
        return bool(self._num_gone and (self.seq_ids[last.slots] != self._last_ids).any())

    def _read(self, message: BatchRows, slots: np.ndarray, num_decodes: int) -> StepRows:
        counts, num_drafts = message.counts, message.num_drafts
        if counts is self._alike[0]:
            return self.decodes(slots, message.starts, *self._alike[1:])
        own, most = counts - num_drafts, int(num_drafts.max(initial=0))
        if np.count_nonzero(own <= 0) or most > self.max_drafts * num_decodes:
            raise WorkerError(
                f"a step is inconsistent: {counts.tolist()} tokens with {num_drafts.tolist()} "
                f"drafts, of which a sequence has at most {self.max_drafts}"
            )
        is_decode = np.count_nonzero(message.samples & (own == num_decodes)) == slots.size
        is_uniform = np.count_nonzero(num_drafts == most) == slots.size
        if is_decode and is_uniform and slots.size and not most % num_decodes:
            self._alike = counts, most // num_decodes, num_decodes
            return self.decodes(slots, message.starts, *self._alike[1:])
        columns = (slots, message.starts, counts, num_drafts, message.samples)
        return StepRows(*columns, is_decode=is_decode, width=1 + most // num_decodes)

    def decodes(
        self, slots: np.ndarray, starts: np.ndarray, num_drafts: int, num_decodes: int
    ) -> StepRows:
        """Rows that decode so many times with as many drafts each. All but slots and starts is the
        same for all batches of a size, and not made again."""
        key = (slots.size, num_drafts, num_decodes)
        if key not in self._uniform:
            same = np.full(slots.size, num_drafts, dtype=np.int64)
            columns = (slots, starts, same + 1, same, same >= 0)
            made = StepRows(*columns, is_decode=True, width=1 + num_drafts, num_decodes=num_decodes)
            made.positions()  # the same in each decode
            made.counts = made.counts * num_decodes
            self._uniform[key] = made
        like = self._uniform[key]
        rows = StepRows(slots, starts, like.counts, like.num_drafts, like.samples, True, like.width)
        rows.num_decodes, rows.sampled = num_decodes, like.sampled
        return rows

    def _check(self, rows: StepRows) -> None:
        """A wrong message must not read or write another sequence's blocks. What is only the most
        that can be is held to the room on the device, and in `exact`."""
        ends: np.ndarray | int = 1
        if not self.max_drafts:
            ends = rows.seq_lens
        elif not rows.is_decode:
            own = rows.counts - rows.num_drafts
            ends = np.where(rows.samples & (own == 1), 1, rows.starts + own)
        if np.count_nonzero(ends > self.room[rows.slots]):
            raise WorkerError(
                f"a step is inconsistent: lengths {ends}, "
                f"blocks {self.num_blocks[rows.slots].tolist()} of {self.block_size}, "
                f"at most {self.max_model_len} tokens, "
                f"sequences {self.seq_ids[rows.slots].tolist()}"
            )

    def exact(self, rows: StepRows, coming: np.ndarray) -> StepRows:
        """The rows as the host knows them, with the drafts that it has for them, which are put
        after their known tokens. coming: see Results.coming."""
        slots, own = rows.slots, rows.counts - rows.num_drafts
        # A sequence that has ended without the scheduler's knowledge computes its last token again.
        room = self.room[slots] - own
        starts = np.minimum(np.minimum(rows.starts, self.num_known[slots] - 1 + coming), room)
        drafts = np.minimum(np.minimum(rows.num_drafts, self.num_drafts[slots]), room - starts)
        if drafts.any():
            ends = np.cumsum(drafts)
            nth = np.arange(int(ends[-1])) - np.repeat(ends - drafts, drafts)
            fed = np.repeat(slots, drafts)
            self.token_ids[fed, np.repeat(starts + own, drafts) + nth] = self.draft_ids[fed, nth]
        most = int(drafts.max(initial=0))
        if rows.is_decode and (drafts == most).all():
            return self.decodes(slots, starts, most, rows.num_decodes)
        columns = (slots, starts, own + drafts, drafts, rows.samples)
        return StepRows(*columns, is_decode=rows.is_decode, width=1 + most)

    # -- what the device is told before a captured step -------------------------------------------

    def bring(
        self, rows: StepRows, size: int, max_drafts: int, *, drafts: StepRows | None = None
    ) -> None:
        """Tell the device what it does not know of the rows, which are padded to `size`.
        max_drafts: see SchedulerOutput. drafts: these rows are fed the host's drafts."""
        limit, sent = max(0, max_drafts), self._sent
        if self.has_drafts:
            # What no step came to feed in time are drafts no more: for them there may be no room.
            is_old = self._drafts_are[rows.slots] == OLD
            if np.count_nonzero(is_old):
                old = rows.slots[is_old]
                self._later.append((self.state.num_drafts, old, old * 0))
                self._drafts_are[old] = NONE
            self.has_drafts = limit > 0 or rows.width > 1 or bool(self._drafts_are.any())
        is_same = rows.slots is sent[0] and size == sent[1] and self.version == sent[2]
        is_told = is_same and limit == self._sent_limit and drafts is None
        if self._later or not is_told:
            self._send(
                [
                    *self._row_updates(rows.slots, size),
                    *self._block_updates(rows.slots),
                    *self._limit_updates(limit),
                    *self._newest_updates(rows),
                    *(self._draft_updates(drafts) if drafts is not None else ()),
                ]
            )
            self._sent = (rows.slots, size, self.version)
            self.is_held[rows.slots] = True
            if not limit:  # nobody reads them after this step, and nobody goes on with them
                self._has_history[rows.slots] = False
        if limit and self.state.history is not None:
            self.catch_up(rows)

    def _send(self, updates: list[Update]) -> None:
        """Each: (where to, at which entries or None: at its beginning, what)."""
        updates, self._later = [*self._later, *updates], []
        arrays: list[np.ndarray] = []
        for _, where, what in updates:
            arrays += [what] if where is None else [where, what]
        sent = iter(self._uploads.send(*arrays)) if arrays else iter(())
        for target, where, _ in updates:
            if where is None:
                target.copy_(next(sent))
                continue
            index, values = next(sent), next(sent).to(target.dtype)
            if target.ndim > 1:
                values = values.view([-1, *target.shape[1:]])
            self._xp.index_copy_(target, 0, index, values)

    def _limit_updates(self, limit: int) -> list[Update]:
        known, self._sent_limit = self._sent_limit, limit
        return [] if known == limit else [(self.state.limit, None, np.array([limit]))]

    def _row_updates(self, slots: np.ndarray, size: int) -> list[Update]:
        wanted = np.full(size, self.max_num_seqs, dtype=np.int64)
        wanted[: slots.size] = slots
        if (wanted == self._sent_rows[:size]).all():
            return []
        self._sent_rows[:size] = wanted
        return [(self.state.rows[:size], None, wanted)]

    def _block_updates(self, slots: np.ndarray) -> list[Update]:
        old, new = self._num_sent[slots], self.num_blocks[slots]
        more = np.flatnonzero(old != new)
        if not more.size:
            return []
        rows = slots = slots[more]
        columns, new = old[more], new[more]
        self._num_sent[slots] = new
        if np.count_nonzero(new - columns > 1):  # seldom
            counts = new - columns
            first = np.cumsum(counts) - counts
            columns = np.arange(int(counts.sum())) + np.repeat(columns - first, counts)
            rows = np.repeat(slots, counts)
        entries = rows * self.block_tables.shape[1] + columns
        tables = [(there.view([-1]), entries, here[rows, columns]) for there, here in self.tables]
        return [*tables, (self.state.room, slots, self.room[slots])]

    def _newest_updates(self, rows: StepRows) -> list[Update]:
        """Of rows that sample for the first time, or whose newest token came with them."""
        is_held = self.is_held[rows.slots]
        if is_held.all():
            return []
        slots, starts = rows.slots[~is_held], rows.starts[~is_held]
        if (starts >= self.num_known[slots]).any():
            raise WorkerError(
                f"a step feeds tokens nobody knows: positions {starts.tolist()}, "
                f"known {self.num_known[slots].tolist()}"
            )
        return [
            (self.state.num_computed, slots, starts),
            (self.state.newest, slots, self.token_ids[slots, starts]),
            *([(self.state.num_drafts, slots, slots * 0)] if self.max_drafts else []),
        ]

    def _draft_updates(self, rows: StepRows) -> list[Update]:
        slots = rows.slots
        return [
            (self.state.drafts, slots, self.draft_ids[slots]),
            (self.state.num_drafts, slots, rows.num_drafts),
        ]

    def note_drafts(self, rows: StepRows, max_drafts: int) -> None:
        """A step was queued that makes so many drafts, after which those before are old."""
        if max_drafts > 0:
            self._drafts_are[rows.slots], self.has_drafts = NEW, True
        elif self.has_drafts:
            self._drafts_are[rows.slots] = np.where(self._drafts_are[rows.slots], OLD, NONE)

    def forget(self) -> None:
        """A step failed: what the device holds is not known."""
        if self.postbox is not None:
            self.postbox.forget()
        self._sent, self._sent_limit, self.version = (None, 0, 0), -1, self.version + 1
        self._later = []
        self._sent_rows[:] = -1
        self.is_held[:] = self._has_history[:] = False
        self._num_sent[:] = 0

    def stand_down(self) -> None:
        """New caches: no table entry of former ones stays, and every row is padding, so that a step
        which runs now writes nothing anywhere."""
        self.forget()
        padding = np.full(self._sent_rows.size, self.max_num_seqs, dtype=np.int64)
        self._send([(self.state.rows, None, padding)])
        self._sent_rows[:] = padding
        for table, _ in self.tables:
            table.zero_()

    # -- what the device keeps of a step ----------------------------------------------------------

    def finish(
        self,
        rows: Tensor,
        sampled: Tensor,
        marked: Tensor,
        peaks: Tensor | None,
        results: Tensor,
        *,
        posts: bool = True,
    ) -> Tensor:
        """The slots of these rows take what was sampled, as far as drafts are accepted: kernel
        finish_decode. posts: in a captured step, whose page of the postbox it is."""
        state = self.state
        post = self.postbox.results if posts and self.postbox is not None else None
        drafts = state.drafts if self._no_drafts is None else self._no_drafts
        held = (drafts, state.num_drafts, state.num_computed, state.newest)
        last: Tensor = self._finish(rows, sampled, marked, peaks, *held, results, post)
        return last

    def take_sampled(self, rows: StepRows, slots_dev: Tensor, token_ids: Tensor) -> None:
        """A step that was laid out on the host, without drafts, sampled these [R] int64, one for
        each row that samples. slots_dev: [R] or more, then the last slot for padding."""
        slots, state = rows.slots[rows.samples], self.state
        self._xp.index_copy_(state.newest, 0, slots_dev, token_ids)
        if self._is_read:
            self._later.append((state.num_computed, slots, rows.seq_lens[rows.samples]))
            if len(self._later) > MOST_LATER:
                self._send([])
        self.is_held[rows.slots] = rows.samples

    def verify(
        self, rows: StepRows, sampled: Tensor, marked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for a step with drafts: sampled and marked [R], for every sampled position.
        Returns results [rows that sample, width] int64 as finish_decode leaves them, how many
        drafts of each were accepted, and for each of the R positions whether its token is kept."""
        xp, where, width = self._xp, rows.positions(), rows.width
        own = rows.samples
        slots, num_drafts = rows.slots[own], rows.num_drafts[own]
        first = np.flatnonzero(where.nth == 0)
        # A table of equally long rows; a short one repeats its last position, which has no draft.
        table = first[:, None] + np.minimum(np.arange(width), num_drafts[:, None])
        place = np.repeat(np.arange(slots.size) * width, num_drafts + 1) + where.nth
        newest = (rows.seq_lens - rows.num_drafts - 1)[own]
        self._send([*self._draft_updates(rows), (self.state.num_computed, slots, newest)])
        table_dev, place_dev, slots_dev = self._uploads.send(table, place, slots)
        results = xp.zeros((slots.size, width), dtype=xp.int64, device=self._device.device)
        sampled, marked = (xp.index_select(x, 0, table_dev) for x in (sampled, marked))
        last = self.finish(slots_dev, sampled, marked, None, results, posts=False)
        steps = xp.arange(slots.size, dtype=xp.int64, device=self._device.device) * width
        kept = xp.index_select(results.reshape([-1]), 0, place_dev) >= 0
        self.is_held[rows.slots] = own
        return results, last - steps, kept

    def keep_drafts(
        self, rows: Tensor, proposals: Tensor, results: Tensor, *, posts: bool
    ) -> Tensor:
        """The slots of these rows take what a drafter proposes, as far as it is tokens and there is
        room. proposals: [B, n] int64; the results, beside them what was taken and -1 after it.
        posts: in a captured step, whose page of the postbox it is."""
        state = self.state
        post = self.postbox.drafts if posts and self.postbox is not None else None
        known = (state.limit, self._vocab_size, state.num_computed, state.room)
        return self._keep_drafts(
            rows, proposals, results, *known, state.drafts, state.num_drafts, post
        )

    def prepare_drafts(self, rows: StepRows, limit: int) -> Tensor:
        """A step laid out on the host is to leave drafts in the slots: tell the device of room and
        limit. Returns the rows' slots on the device."""
        self._send([*self._block_updates(rows.slots), *self._limit_updates(limit)])
        return self._device.to_device(rows.slots)

    # -- histories on the device ------------------------------------------------------------------

    def append_history(self, results: Tensor) -> None:
        """Histories of a captured step's rows go on with what it has sampled and kept. results: see
        kernel finish_decode."""
        state = self.state
        if state.history is not None:
            rows = state.rows[: results.shape[0]]
            self._append(rows, results, state.num_computed, state.history)

    def follow_history(self, rows: StepRows, sampled: Tensor, max_drafts: int) -> None:
        """A step laid out on the host sampled these: histories go on. sampled: [R] int64, of which
        those after a refused draft are overwritten later. max_drafts: see SchedulerOutput."""
        history = self.state.history
        if history is None:
            return
        if max_drafts < 0:
            self._has_history[rows.slots] = False
            return
        self.catch_up(rows)
        slots = rows.slots[rows.positions().rows]
        where = slots * history.shape[1] + rows.sample_positions()
        index = self._uploads.send(where)[0]
        self._xp.index_copy_(history.view([-1]), 0, index, sampled.to(self._xp.int32))

    def lacks_history(self, rows: StepRows, max_drafts: int = 1) -> bool:
        """Whether the host must send histories of these rows before so many drafts are made."""
        is_read = self.state.history is not None and max_drafts > 0
        return is_read and not all(self._has_history[rows.slots].tolist())

    def catch_up(self, rows: StepRows) -> None:
        """Send the histories that the device does not have. It goes on with them itself; the newest
        token, if that is still on its way to the host, it has, too. Further ones on their way,
        which only several decodes without drafts leave, are missing: that costs accepted drafts,
        and the output nothing."""
        history = self.state.history
        assert history is not None
        if not self.lacks_history(rows):
            return
        is_new = ~self._has_history[rows.slots]
        slots = rows.slots[is_new]
        self._has_history[slots] = True
        counts = self.num_known[slots]
        nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = np.repeat(slots, counts)
        entries = owners * history.shape[1] + nth
        self._send([(history.view([-1]), entries, self.token_ids[owners, nth])])
        is_new &= self.num_known[rows.slots] <= rows.starts
        if is_new.any():
            slots = rows.slots[is_new]
            where = slots * history.shape[1] + rows.starts[is_new]
            index, slots_dev = self._uploads.send(where, slots)
            newest = self._xp.index_select(self.state.newest, 0, slots_dev).to(self._xp.int32)
            self._xp.index_copy_(history.view([-1]), 0, index, newest)
