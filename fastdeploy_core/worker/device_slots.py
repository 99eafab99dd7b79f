"""What the device knows of every sequence, and what the host knows of that.

A decode step reads its tokens, positions and block tables from here without the host, and writes back
what it drew. The host compares what a step's message says with what the device is known to hold, and
sends the difference: nothing at all while the same sequences go on within their blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fastdeploy_core.contracts.device import PostingDevice
from fastdeploy_core.errors import WorkerError

from .input_batch import NOWHERE, TRUSTED
from .posting import Postbox
from .staging import Uploads

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .input_batch import InputBatch
    from .step_rows import StepRows

UNKNOWN = -1
ON_DEVICE = -2  # in place of a number of drafts: those that a drafter has left there
Update: TypeAlias = "tuple[Tensor, np.ndarray | None, np.ndarray]"


class DeviceSlots:
    """One entry per slot of the InputBatch, and a last one that is nobody's.

    `rows` holds the slots of a decode step's rows; what is missing to its size names the last slot.
    """

    def __init__(
        self,
        device: DeviceBackend,
        batch: InputBatch,
        max_drafts: int = 0,
        *,
        kernels: KernelTable,
        vocab_size: int,
        refuses_drafts: bool = False,
        keeps_history: bool = False,
        max_decodes: int = 1,
    ) -> None:
        """refuses_drafts: see DraftJudge. keeps_history: see DraftBatch.history. max_decodes: see WorkerInfo."""
        self._append, self._finish = kernels["append_history"], kernels["finish_decode"]
        self._keep, self._vocab_size = kernels["keep_drafts"], vocab_size
        xp, num_slots = device.xp, batch.max_num_seqs + 1
        self._refuses_drafts = refuses_drafts
        self._xp, self._batch, self._uploads = xp, batch, Uploads(device)
        self.max_drafts = max_drafts

        def zeros(*shape: int, dtype: object = xp.int64) -> Tensor:
            return xp.zeros(shape, dtype=dtype, device=device.device)

        self.tables = zeros(num_slots, batch.block_tables.shape[1], dtype=xp.int32)
        self._flat_tables = self.tables.view([-1])
        self.num_computed = zeros(num_slots)
        self.newest = batch.newest_dev
        self.drafts = zeros(num_slots, max_drafts)
        self.num_drafts = zeros(num_slots)
        self.room = zeros(num_slots)  # tokens that the slot's blocks hold
        self.limit = zeros(1)  # drafts that a row may have
        self.turn = zeros(1)  # recorded steps so far
        self.postbox: Postbox | None = None
        if isinstance(device, PostingDevice):
            self.postbox = Postbox(device, self.turn, batch.max_num_seqs, max_drafts, max_decodes)
        self._none = zeros(num_slots, max_drafts) - 1  # drafts that are never right
        self.rows = zeros(batch.max_num_seqs) + batch.max_num_seqs
        self.history: Tensor | None = None
        if keeps_history:
            # What ended may go on for two steps.
            longest = batch.max_model_len + max_drafts + 2 + 2 * max_decodes
            self.history = zeros(num_slots, longest, dtype=xp.int32)
        self._has_history = np.zeros(batch.max_num_seqs, dtype=bool)
        # What the device holds, as far as the host knows.
        self._rows = np.full(batch.max_num_seqs, batch.max_num_seqs, dtype=np.int64)
        self._last: tuple[np.ndarray | None, int] = (None, 0)
        self._ahead: np.ndarray | None = None  # the seq_lens that the device has written itself
        self._num_appends = -1
        self._computed = np.full(batch.max_num_seqs, UNKNOWN, dtype=np.int64)
        self._num_blocks = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._drafts = np.zeros((batch.max_num_seqs, max_drafts), dtype=np.int64)
        self._num_drafts = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._limit = 0

    def reset(self, slot: int) -> None:
        """The slot's sequence left; of the next one the device knows nothing."""
        self._computed[slot] = self._num_drafts[slot] = UNKNOWN
        self._num_blocks[slot] = 0
        self._drafts[slot] = 0
        self._has_history[slot] = False

    def stand_down(self) -> None:
        """New caches: no table entry of former ones stays, and every row is nobody's, so that a step
        which runs now writes nothing anywhere."""
        self.forget()
        nobody = np.full(self._rows.size, self._batch.max_num_seqs, dtype=np.int64)
        self.rows.copy_(self._uploads.send(nobody)[0])
        self._rows[:] = nobody
        self.tables.zero_()

    def forget(self) -> None:
        """A step failed: what the device holds is not known."""
        if self.postbox is not None:
            self.postbox.forget()
        self._last, self._ahead = (None, 0), None
        self._rows[:] = UNKNOWN
        self._limit = UNKNOWN
        for slot in range(self._computed.size):
            self.reset(slot)
        self._batch.newest[:] = NOWHERE

    def sync(self, rows: StepRows, size: int, max_drafts: int = 0) -> None:
        """Make the device's state that of the rows, which are padded to `size`. max_drafts: see
        SchedulerOutput."""
        batch, limit = self._batch, max(0, max_drafts)
        goes_on = self._last[0] is rows.slots and self._last[1] == size and limit == self._limit
        is_known = rows.is_ahead or rows.starts is self._ahead
        if goes_on and is_known and self._num_appends == batch.num_appends:
            return
        self._ahead = None
        updates = self._rows_update(rows.slots, size)
        updates += self._block_updates(rows.slots)
        updates += self._limit_update(limit)
        if rows.is_ahead:
            self._check_held(rows)
        else:
            updates += self._position_updates(rows)
            if not rows.is_decode:
                updates += self._draft_updates(rows)
        self._num_appends = batch.num_appends
        self._send(updates)
        if self.history is None:
            return
        if not limit:  # nobody reads them behind this step, and nobody goes on with them
            self._has_history[rows.slots] = False
        elif not rows.is_ahead:
            self._catch_up(rows)

    def _send(self, updates: list[Update]) -> None:
        updates = [update for update in updates if update[2].size]
        if not updates:
            return
        arrays = [array for _, *pair in updates for array in pair if array is not None]
        sent = iter(self._uploads.send(*arrays))
        for target, where, _ in updates:
            if where is None:
                target.copy_(next(sent))
                continue
            index, values = next(sent), next(sent).to(target.dtype)
            if target.ndim > 1:
                values = values.view([-1, *target.shape[1:]])
            self._xp.index_copy_(target, 0, index, values)

    def advance(self, rows: StepRows) -> None:
        """The device has been told to write back what it draws for these rows."""
        slots, batch = rows.slots, self._batch
        is_known = rows.is_decode and not rows.is_ahead
        self._ahead = rows.seq_lens if is_known else None
        if is_known:
            self._computed[slots] = batch.newest[slots] = rows.seq_lens
        else:  # how many drafts are right is the device's secret
            self._computed[slots] = batch.newest[slots] = TRUSTED

    def fall_behind(self, rows: StepRows) -> None:
        """These rows go on in a step that the slots take no part in."""
        self._computed[rows.slots] = UNKNOWN

    def keep_drafts(
        self, rows: Tensor, proposals: Tensor, results: Tensor, *, posts: bool
    ) -> Tensor:
        """The slots of these rows take what a drafter proposes, as far as it is tokens and there is room.
        proposals: [B, n] int64; the results, beside them what was taken and -1 behind it. posts: in a recorded
        step, whose page of the postbox it is."""
        post = self.postbox.drafts if posts and self.postbox is not None else None
        return self._keep(
            *(rows, proposals, results, self.limit, self._vocab_size, self.num_computed, self.room),
            *(self.drafts, self.num_drafts, post),
        )

    def holds_drafts(self, rows: StepRows) -> None:
        """The device has been told to keep drafts for these rows."""
        self._num_drafts[rows.slots] = ON_DEVICE

    def follow(self, rows: StepRows, accepted: Tensor | None, limit: int) -> None:
        """A step that the slots took no part in has drawn tokens: its sequences stand behind it now, so
        that a step can go ahead of its results. accepted: [rows that sample] right drafts; None: the step
        fed none. limit: see `sync`."""
        slots = rows.slots[rows.samples]
        ends = (rows.seq_lens - rows.num_drafts)[rows.samples]
        updates = self._block_updates(slots) + self._limit_update(limit)
        if accepted is None:
            self._computed[slots] = ends
            self._send([*updates, (self.num_computed, slots, ends)])
            return
        self._send(updates)
        self._computed[slots] = TRUSTED
        where, known = self._uploads.send(slots, ends)
        self._xp.index_copy_(self.num_computed, 0, where, known + accepted)

    def take_drawn(self, rows: StepRows, drawn: Tensor, max_drafts: int) -> None:
        """A step that the slots take no part in drew these: histories go on. drawn: [R] int64, of which
        those behind a wrong draft are overwritten later. max_drafts: see SchedulerOutput."""
        if self.history is None:
            return
        if max_drafts < 0:
            self._has_history[rows.slots] = False
            return
        self._catch_up(rows)
        where = rows.slots[rows.sample_rows] * self.history.shape[1] + rows.sample_positions
        index = self._uploads.send(where)[0]
        self._xp.index_copy_(self.history.view([-1]), 0, index, drawn.to(self._xp.int32))

    def append_history(self, results: Tensor) -> None:
        """Histories of the step's rows go on with what it has drawn and kept. results: see kernel
        finish_decode."""
        if self.history is not None:
            self._append(self.rows[: results.shape[0]], results, self.num_computed, self.history)

    def finish(
        self, rows: Tensor, drawn: Tensor, marked: Tensor, peaks: Tensor | None, results: Tensor
    ) -> Tensor:
        """The slots of these rows take what was drawn, as far as drafts are right: kernel finish_decode."""
        drafts = self._none if self._refuses_drafts else self.drafts
        state = (drafts, self.num_drafts, self.num_computed, self.newest)
        post = None if self.postbox is None else self.postbox.results
        last: Tensor = self._finish(rows, drawn, marked, peaks, *state, results, post)
        return last

    # -- what differs: (where to, at which entries, what); None: at its beginning ------------------

    def _rows_update(self, slots: np.ndarray, size: int) -> list[Update]:
        if self._last[0] is slots and self._last[1] == size:
            return []
        self._last = (slots, size)
        wanted = np.full(size, self._batch.max_num_seqs, dtype=np.int64)
        wanted[: slots.size] = slots
        if (wanted == self._rows[:size]).all():
            return []
        self._rows[:size] = wanted
        return [(self.rows[:size], None, wanted)]

    def _block_updates(self, slots: np.ndarray) -> list[Update]:
        batch = self._batch
        old, new = self._num_blocks[slots], batch.num_blocks[slots]
        more = np.flatnonzero(old != new)
        if not more.size:
            return []
        slots, old, counts = slots[more], old[more], (new - old)[more]
        first = np.cumsum(counts) - counts
        columns = np.arange(int(counts.sum())) + np.repeat(old - first, counts)
        rows = np.repeat(slots, counts)
        self._num_blocks[slots] = batch.num_blocks[slots]
        entries = rows * batch.block_tables.shape[1] + columns
        return [
            (self._flat_tables, entries, batch.block_tables[rows, columns]),
            (self.room, slots, batch.room[slots]),
        ]

    def _limit_update(self, limit: int) -> list[Update]:
        if limit == self._limit:
            return []
        self._limit = limit
        return [(self.limit, None, np.array([limit]))]

    def _check_held(self, rows: StepRows) -> None:
        slots = rows.slots
        lost = (self._computed[slots] == UNKNOWN) | (self._batch.newest[slots] == NOWHERE)
        if rows.num_drafts.any():
            lost |= self._num_drafts[slots] != ON_DEVICE
        if lost.any():
            raise WorkerError(
                f"a step goes ahead of results with rows that the device does not hold: sequences "
                f"{self._batch.seq_ids[slots[lost]].tolist()}"
            )

    def _position_updates(self, rows: StepRows) -> list[Update]:
        """Rows whose number of tokens or newest token the device does not have."""
        slots, starts, batch = rows.slots, rows.starts, self._batch
        computed, newest = self._computed[slots], batch.newest[slots]
        counted = ((computed == starts) | (computed == TRUSTED)) & (newest != NOWHERE)
        held = (newest == starts) | (newest == TRUSTED)
        if counted.all() and held.all():
            return []
        miscounted, lost = slots[~counted], slots[~held]
        self._computed[miscounted] = starts[~counted]
        where = starts[~held]
        if (where >= batch.num_known[lost]).any():
            raise WorkerError(
                f"a step feeds tokens nobody knows: positions {where.tolist()}, "
                f"known {batch.num_known[lost].tolist()}"
            )
        batch.newest[lost] = where
        return [
            (self.num_computed, miscounted, starts[~counted]),
            (self.newest, lost, batch.token_ids[lost, where]),
        ]

    def _catch_up(self, rows: StepRows) -> None:
        """Give the device the histories that it does not have. It goes on with them itself; the newest token,
        if that is still on its way to the host, it has, too. Further ones on their way, which only several decodes
        without drafts leave, are missing: that costs right drafts, and the output nothing."""
        assert self.history is not None
        is_new = ~self._has_history[rows.slots]
        if not is_new.any():
            return
        self._send(self._history_updates(rows.slots))
        is_new &= self._batch.num_known[rows.slots] <= rows.starts
        if is_new.any():
            slots = rows.slots[is_new]
            where = slots * self.history.shape[1] + rows.starts[is_new]
            index, slots_dev = self._uploads.send(where, slots)
            newest = self._xp.index_select(self.newest, 0, slots_dev).to(self._xp.int32)
            self._xp.index_copy_(self.history.view([-1]), 0, index, newest)

    def _history_updates(self, slots: np.ndarray) -> list[Update]:
        """All known tokens of sequences whose history is not here."""
        batch, slots = self._batch, slots[~self._has_history[slots]]
        self._has_history[slots] = True
        counts = batch.num_known[slots]
        nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(slots, counts)
        assert self.history is not None
        entries = rows * self.history.shape[1] + nth
        return [(self.history.view([-1]), entries, batch.token_ids[rows, nth])]

    def _draft_updates(self, rows: StepRows) -> list[Update]:
        slots, counts = rows.slots, rows.num_drafts
        nth = np.arange(self.max_drafts)
        where = np.minimum(rows.starts[:, None] + 1 + nth, self._batch.max_model_len)
        fed = nth < counts[:, None]
        wanted = self._batch.token_ids[slots[:, None], where] * fed
        wrong = (fed & (wanted != self._drafts[slots])).any(1) | (counts != self._num_drafts[slots])
        slots, counts, wanted = slots[wrong], counts[wrong], wanted[wrong]
        self._drafts[slots], self._num_drafts[slots] = wanted, counts
        return [(self.drafts, slots, wanted), (self.num_drafts, slots, counts)]
