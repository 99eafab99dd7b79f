"""The worker's memory of its sequences: one slot each in preallocated host and device buffers.

Slots are recycled through one function, `reset`, so that nothing of a former sequence survives in a
slot. A decode step is vector work over the slots of the batch; nothing is done per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import BatchRows, NewSequence, SchedulerOutput

from . import padded_batch
from .step_rows import StepRows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

    from .step_shapes import StepShapes


# In place of the position of the token in newest_dev. NOWHERE: it is of no use. TRUSTED: it is the newest
# one, but only the device knows where that stands, until the step that drew it has been read.
NOWHERE, TRUSTED = -1, -2


class SlotState(Protocol):
    """Anything that remembers something per slot."""

    def reset(self, slot: int) -> None:
        """Forget the slot's sequence entirely."""
        ...


class InputBatch:
    """Slots of up to max_num_seqs sequences."""

    def __init__(
        self,
        device: DeviceBackend,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        parts: Sequence[SlotState] = (),
        max_drafts: int = 0,
        shapes: StepShapes | None = None,
    ) -> None:
        self._shapes = shapes  # what steps are padded to; None: as they come
        self._device, self._xp = device, device.xp
        self.max_num_seqs, self.max_model_len, self.block_size = (
            max_num_seqs,
            max_model_len,
            block_size,
        )
        self._parts = tuple(parts)
        self._block_size = np.int64(block_size)  # so that int32 block numbers do not overflow
        max_blocks = -(-(max_model_len + max_drafts) // block_size) + 1
        # Host buffers, one row per slot. Zeroed pages cost nothing until they are written.
        longest = max_model_len + 1
        self.token_ids = np.zeros((max_num_seqs, longest + 1 + max_drafts), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.room = np.zeros(max_num_seqs, dtype=np.int64)  # tokens that its blocks hold
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_known = np.zeros(max_num_seqs, dtype=np.int64)  # tokens the host knows
        self.newest = np.full(
            max_num_seqs, NOWHERE, dtype=np.int64
        )  # where newest_dev's token stands
        self.owner = np.zeros(max_num_seqs, dtype=np.int64)  # counts the slot's sequences
        self.seq_ids = np.full(max_num_seqs, -1, dtype=np.int64)
        self.slot_of: dict[int, int] = {}
        self._free = list(range(max_num_seqs))  # a heap: low slots first keep batches dense
        # The newest sampled token of each slot, for steps launched before the host saw it. One more
        # entry is nobody's: see device_slots.py.
        self.newest_dev = self._xp.zeros(
            (max_num_seqs + 1,), dtype=self._xp.int64, device=device.device
        )
        self._tables: tuple[np.ndarray, int, np.ndarray, Tensor] | None = None
        self._decode_cu: dict[int, tuple[np.ndarray, Tensor]] = {}
        self._same: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._even: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        # Arrays are kept while the rows stay, so that others see at a glance that they did.
        self._last: StepRows | None = None
        self._last_ids = np.zeros(0, dtype=np.int64)
        self._num_gone = 0  # sequences that left since then
        self.num_appends = 0  # grows with every block that a sequence gets later

    def watch(self, part: SlotState) -> None:
        """One more that remembers something per slot."""
        self._parts = (*self._parts, part)

    # -- sequences --------------------------------------------------------------------------------

    def add(self, new: NewSequence) -> int:
        """Give a sequence a slot. A sequence that is already here starts anew."""
        if new.seq_id in self.slot_of:
            self.remove(new.seq_id)
        if not self._free:
            raise WorkerError(
                f"sequence {new.seq_id} does not fit: all {self.max_num_seqs} slots are taken"
            )
        if new.extras is not None and new.extras.needs:
            raise WorkerError(
                f"sequence {new.seq_id} brings {', '.join(sorted(new.extras.needs))}, which this "
                "worker does not report among its features"
            )
        length, num_blocks = len(new.token_ids), len(new.block_ids)
        if length > self.max_model_len or num_blocks > self.block_tables.shape[1]:
            raise WorkerError(
                f"sequence {new.seq_id} has {length} tokens and {num_blocks} blocks; this worker "
                f"holds {self.max_model_len} tokens and {self.block_tables.shape[1]} blocks each"
            )
        slot = heapq.heappop(self._free)
        self.slot_of[new.seq_id] = slot
        self.seq_ids[slot] = new.seq_id
        self.token_ids[slot, :length] = new.token_ids
        self.block_tables[slot, :num_blocks] = new.block_ids
        self.num_blocks[slot] = num_blocks
        self.room[slot] = min(num_blocks * self.block_size, self.max_model_len)
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_known[slot] = length
        self._tables = None
        return slot

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        slot = self.slot_of.pop(seq_id, None)
        if slot is not None:
            self._num_gone += 1
            self.reset(slot)
            heapq.heappush(self._free, slot)

    def reset(self, slot: int) -> None:
        """The one place where a slot is cleaned: every buffer and every part with state per slot."""
        self.token_ids[slot] = 0
        self.block_tables[slot] = 0
        self.num_blocks[slot] = self.num_prompt[slot] = self.num_known[slot] = self.room[slot] = 0
        self.newest[slot], self.seq_ids[slot] = NOWHERE, -1
        self.owner[slot] += 1
        self._tables = None
        for part in self._parts:
            part.reset(slot)

    def output_tokens(self, slot: int) -> np.ndarray:
        """What the sequence generated, as far as the host knows; a view."""
        return self.token_ids[slot, self.num_prompt[slot] : self.num_known[slot]]

    # -- a step -----------------------------------------------------------------------------------

    def rows(self, step: SchedulerOutput) -> StepRows:
        """Read one step's rows and take over new blocks and drafts."""
        if step.rows is None:
            return self._next_rows(step)
        message = step.rows
        if message.seq_ids is not self._last_ids or self._is_missing(self._last):
            self._last_ids, self._last = message.seq_ids, None
        slots = self._slots_of(message.seq_ids) if self._last is None else self._last.slots
        self._num_gone = 0
        for row, block_ids in step.new_block_ids.items():
            self._append_blocks(int(slots[row]), block_ids)
        if message.is_ahead:
            rows = self._rows_ahead(message, slots, step.num_decodes)
        elif step.num_decodes > 1 or message.is_decode:
            rows = self._decode_rows(slots, message.starts, step.num_decodes)
        else:
            rows = self._mixed_rows(message, slots)
        self._last = self._shaped(rows)
        return self._last

    def _next_rows(self, step: SchedulerOutput) -> StepRows:
        """The rows of the step before go on, each with the token that it sampled."""
        last = self._last
        if last is None or last.is_ahead or not (last.is_decode or last.fits_next()):
            raise WorkerError("a step is inconsistent: it goes on with rows that cannot")
        if self._is_missing(last):
            raise WorkerError("a step is inconsistent: it goes on with a finished sequence")
        self._num_gone = 0
        for row, block_ids in step.new_block_ids.items():
            self._append_blocks(int(last.slots[row]), block_ids)
        self._last = self._shaped(self._decode_rows(last.slots, last.seq_lens, step.num_decodes))
        return self._last

    def _is_missing(self, last: StepRows | None) -> bool:
        """Whether one of the last step's rows is not where it was any more."""
        if last is None or not self._num_gone:
            return last is None
        return bool((self.seq_ids[last.slots] != self._last_ids).any())

    def _shaped(self, rows: StepRows) -> StepRows:
        if self._shapes is None or not rows.slots.size:
            return rows
        return rows.shaped(self._shapes.find(rows))

    def _slots_of(self, seq_ids: np.ndarray) -> np.ndarray:
        try:
            slots = [self.slot_of[seq_id] for seq_id in seq_ids.tolist()]
        except KeyError as error:
            raise WorkerError(
                f"a step names sequence {error}, which this worker was never given"
            ) from None
        if len(set(slots)) != len(slots):
            raise WorkerError(f"a step is inconsistent: it names a sequence twice, slots {slots}")
        return np.array(slots, dtype=np.int64)

    def _decode_rows(self, slots: np.ndarray, starts: np.ndarray, num_decodes: int) -> StepRows:
        """One token per row, so many times."""
        key = (slots.size, num_decodes)
        if key not in self._same:
            zeros = np.zeros(slots.size, dtype=np.int64)
            self._same[key] = (zeros + num_decodes, zeros, zeros == 0, np.arange(slots.size))
        counts, none, samples, every = self._same[key]
        seq_lens = starts + num_decodes
        self._check(slots, seq_lens)
        return StepRows(
            *(slots, starts, counts, seq_lens, none, samples, True),
            *(every, every, seq_lens),
            num_decodes=num_decodes,
        )

    def _rows_ahead(self, message: BatchRows, slots: np.ndarray, num_decodes: int) -> StepRows:
        """Rows of which the device knows more; those without room write nothing there."""
        width = int(message.counts[0]) // num_decodes  # the same for all of them
        key = (slots.size, width)
        if key not in self._even:
            self._even[key] = (
                np.repeat(np.arange(slots.size), width),
                np.arange(slots.size * width),
                np.tile(np.arange(width), slots.size),
            )
        rows, every, nth = self._even[key]
        starts, seq_lens = message.starts, message.starts + message.counts
        return StepRows(
            *(slots, starts, message.counts, seq_lens, message.num_drafts // num_decodes),
            *(message.samples, width == 1, rows, every, starts[rows] + 1 + nth),
            is_ahead=True,
            num_decodes=num_decodes,
        )

    def _mixed_rows(self, message: BatchRows, slots: np.ndarray) -> StepRows:
        """Rows of different lengths, some of which may not sample, or sample behind drafts."""
        starts, counts, num_drafts = message.starts, message.counts, message.num_drafts
        samples, seq_lens = message.samples, starts + counts
        if bool((counts <= num_drafts).any()):
            raise WorkerError(
                f"a step is inconsistent: {counts.tolist()} tokens with {num_drafts.tolist()} drafts"
            )
        self._check(slots, seq_lens)
        if num_drafts.any():
            ends = np.cumsum(num_drafts)
            nth = np.arange(int(ends[-1])) - np.repeat(ends - num_drafts, num_drafts)
            where = np.repeat(seq_lens - num_drafts, num_drafts) + nth
            self.token_ids[np.repeat(slots, num_drafts), where] = message.draft_token_ids
        num_samples = np.where(samples, num_drafts + 1, 0)
        rows = np.repeat(np.arange(slots.size), num_samples)
        # Within a row the sampled positions follow each other, the first behind the last token
        # that is no draft.
        first = np.cumsum(num_samples) - num_samples
        nth = np.arange(rows.size) - first[rows]
        tokens = (np.cumsum(counts) - 1 - num_drafts)[rows] + nth
        return StepRows(
            *(slots, starts, counts, seq_lens, num_drafts, samples, False),
            *(rows, tokens, (seq_lens - num_drafts)[rows] + nth),
        )

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        first = int(self.num_blocks[slot])
        last = first + len(block_ids)
        if last > self.block_tables.shape[1]:
            raise WorkerError(
                f"sequence {self.seq_ids[slot]} would get {last} blocks; "
                f"{self.block_tables.shape[1]} are the most for {self.max_model_len} tokens"
            )
        self.block_tables[slot, first:last] = block_ids
        self.num_blocks[slot] = last
        self.room[slot] = min(last * self.block_size, self.max_model_len)
        self.num_appends += 1
        self._tables = None

    def _check(self, slots: np.ndarray, seq_lens: np.ndarray) -> None:
        """A wrong message must not read or write another sequence's blocks."""
        if np.count_nonzero(seq_lens > self.room[slots]):
            raise WorkerError(
                f"a step is inconsistent: lengths {seq_lens.tolist()}, "
                f"blocks {self.num_blocks[slots].tolist()} of {self.block_size}, "
                f"at most {self.max_model_len} tokens, sequences {self.seq_ids[slots].tolist()}"
            )

    def attention_batch(self, rows: StepRows) -> tuple[AttentionBatch, np.ndarray, np.ndarray]:
        """The batch for attention drivers, with the slot and position of each token on the host."""
        to_device, num_seqs = self._device.to_device, rows.slots.size
        if rows.is_decode:
            token_slots, positions = rows.slots, rows.starts
            cu_seqlens, cu_seqlens_dev = self._decode_offsets(num_seqs)
        else:
            token_slots = np.repeat(rows.slots, rows.counts)
            cu_seqlens = np.zeros(num_seqs + 1, dtype=np.int32)
            np.cumsum(rows.counts, out=cu_seqlens[1:])
            offsets = rows.starts - cu_seqlens[:-1]
            positions = np.arange(token_slots.size) + np.repeat(offsets, rows.counts)
            cu_seqlens_dev = to_device(cu_seqlens)
        if rows.shape is not None:
            padded = padded_batch.attention_batch(
                self._device, self, rows, rows.shape, token_slots, positions
            )
            return padded, token_slots, positions
        block, offset = np.divmod(positions, self.block_size)
        slot_mapping = self.block_tables[token_slots, block] * self._block_size + offset
        block_tables, block_tables_dev = self._block_tables(rows)
        seq_lens = rows.seq_lens.astype(np.int32)
        batch = AttentionBatch(
            num_seqs=num_seqs,
            num_tokens=int(positions.size),
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            block_tables=block_tables,
            cu_seqlens_q_dev=cu_seqlens_dev,
            seq_lens_dev=to_device(seq_lens),
            block_tables_dev=block_tables_dev,
            slot_mapping=to_device(slot_mapping),
            positions=to_device(positions),
            tokens_per_row=1 if rows.is_decode else 0,
        )
        return batch, token_slots, positions

    def input_ids(self, rows: StepRows, token_slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """[T] int64: from the host where it knows the token, else the newest one on the device."""
        xp, to_device = self._xp, self._device.to_device
        behind = positions >= self.num_known[token_slots]
        known = self.token_ids[token_slots, positions].astype(np.int64)
        if not behind.any() and rows.shape is None:
            return to_device(known)
        newest = self.newest[token_slots]
        newest = np.where(newest == TRUSTED, np.repeat(rows.starts, rows.counts), newest)
        unknown = behind & (positions == newest)
        if int(behind.sum()) != int(unknown.sum()) + int(rows.num_drafts.sum()):
            raise WorkerError(
                f"a step feeds tokens nobody knows: starts {rows.starts.tolist()}, "
                f"lengths {rows.seq_lens.tolist()}, known {self.num_known[rows.slots].tolist()}"
            )
        if rows.shape is not None:
            slots = np.where(unknown, token_slots, -1)
            return padded_batch.input_ids(self._device, self, rows, rows.shape, known, slots)
        if unknown.all():
            return xp.index_select(self.newest_dev, 0, to_device(token_slots))
        input_ids = to_device(known)
        if unknown.any():
            where = np.flatnonzero(unknown)
            newest = xp.index_select(self.newest_dev, 0, to_device(token_slots[where]))
            xp.index_copy_(input_ids, 0, to_device(where), newest)
        return input_ids

    def sampled(
        self, slots: np.ndarray, slots_dev: Tensor, positions: np.ndarray, ids: Tensor
    ) -> None:
        """Tokens were drawn for these slots, and only the device knows them yet."""
        self._xp.index_copy_(self.newest_dev, 0, slots_dev, ids)
        self.newest[slots] = positions

    def drawn_behind_drafts(self, slots: np.ndarray, slots_dev: Tensor, ids: Tensor) -> None:
        """Tokens were drawn for these slots, and only the device knows them and where they stand."""
        self._xp.index_copy_(self.newest_dev, 0, slots_dev, ids)
        self.newest[slots] = TRUSTED

    def forget_newest(self, slot: int) -> None:
        """What the device holds for the slot was not kept; the host says it anew."""
        self.newest[slot] = NOWHERE

    def learn(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """The host learns the token at each slot's position."""
        self.token_ids[slots, positions] = token_ids
        self.num_known[slots] = positions + 1

    def learn_several(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """The host learns the next tokens of each slot. token_ids: [slots, n], of which a row's first
        `counts` count."""
        known = self.num_known[slots]
        where = known[:, None] + np.arange(token_ids.shape[1])
        self.token_ids[slots[:, None], where] = token_ids
        # What has come to its end goes on until the scheduler knows.
        self.num_known[slots] = np.minimum(known + counts, self.max_model_len + 1)

    def _decode_offsets(self, num_seqs: int) -> tuple[np.ndarray, Tensor]:
        """0, 1, ... num_seqs: the same for every decode step of this size."""
        if num_seqs not in self._decode_cu:
            host = np.arange(num_seqs + 1, dtype=np.int32)
            self._decode_cu[num_seqs] = (host, self._device.to_device(host))
        return self._decode_cu[num_seqs]

    def _block_tables(self, rows: StepRows) -> tuple[np.ndarray, Tensor]:
        """Tables of the rows, no wider than the longest; kept while neither rows nor blocks change."""
        width = max(1, -(-int(rows.seq_lens.max(initial=1)) // self.block_size))
        kept = self._tables
        if kept is not None and kept[1] == width and kept[0] is rows.slots:
            return kept[2], kept[3]
        host = self.block_tables[rows.slots, :width]
        self._tables = (rows.slots, width, host, self._device.to_device(host))
        return host, self._tables[3]
