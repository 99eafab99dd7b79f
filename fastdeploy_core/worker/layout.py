"""How a step lies in memory: as it comes, padded to a shape, or in the buffers of a captured graph.

A step laid out on the host is exact, or a rectangle on a device that compiles each shape. A
captured step reads the same numbers from buffers at fixed addresses, where kernel prepare_decode
puts them out of the slots: the device's counterpart of `place`, which tests compare with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.errors import WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend, StepBuckets
    from fastdeploy_core.contracts.model import Retention
    from fastdeploy_core.layers.context import EmbeddedRows
    from fastdeploy_core.models.media import SequenceMedia
    from fastdeploy_core.tensor import Tensor

    from .slots import Slots
    from .step import StepRows


def place(rows: StepRows, slots: Slots) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[T] each: the slot of every token that is fed, its position in its sequence, and its place in
    the cache (block * block size + offset)."""
    if rows.placed is None:
        if rows.is_decode and rows.width == 1:
            token_slots, positions = rows.slots, rows.starts
        else:
            token_slots = np.repeat(rows.slots, rows.counts)
            begin = rows.starts - rows.cuts()[:-1]
            positions = np.arange(token_slots.size) + np.repeat(begin, rows.counts)
        block, offset = np.divmod(positions, slots.block_size)
        blocks = slots.block_tables[token_slots, block].astype(np.int64)
        rows.placed = token_slots, positions, blocks * slots.block_size + offset
    return rows.placed


class LaidOut(NamedTuple):
    """A step in memory."""

    attention: AttentionBatch
    input_ids: Tensor  # [T] int64
    more: Mapping[Retention, AttentionBatch]  # the same for each bounded group of layers
    axes: Tensor | None = None  # [3, T] int64: positions, where they differ between the axes
    embedded: EmbeddedRows | None = None


class HostLayout:
    """Lays a step out on the host."""

    def __init__(
        self, device: DeviceBackend, slots: Slots, media: SequenceMedia | None = None
    ) -> None:
        self._device, self._xp, self._slots, self._media = device, device.xp, slots, media
        # Block tables of the last step: slots, their version, width; kept while these stay.
        self._tables: tuple[np.ndarray, int, int, np.ndarray, Tensor] | None = None

    def lay_out(self, rows: StepRows) -> LaidOut:
        """The step as attention drivers and the model see it."""
        token_slots, indices, where = place(rows, self._slots)
        input_ids = self._input_ids(rows, token_slots, indices)
        if rows.shape is not None:
            return LaidOut(self._rectangle(rows, rows.shape, indices, where), input_ids, {})
        positions, axes, embedded = indices, None, None
        if self._media is not None:
            positions, axes = self._media.positions(token_slots, indices)
            fed = rows.slots, rows.starts, rows.counts, rows.first_tokens()
            embedded = self._media.embedded(*fed)
        batch, more, put = self._exact(rows, positions, where), {}, self._device.to_device
        for rule, tables in self._slots.more_tables.items():
            block, offset = np.divmod(indices, self._slots.block_size)
            own = np.ascontiguousarray(tables[rows.slots, : batch.block_tables.shape[1]])
            where = tables[token_slots, block].astype(np.int64) * self._slots.block_size + offset
            there = {"block_tables_dev": put(own), "slot_mapping": put(where)}
            more[rule] = replace(batch, block_tables=own, **there)
        axes = None if axes is None else self._device.to_device(axes)
        return LaidOut(batch, input_ids, more, axes, embedded)

    def _exact(
        self, rows: StepRows, positions: np.ndarray, cache_slots: np.ndarray
    ) -> AttentionBatch:
        to_device, is_single = self._device.to_device, rows.is_decode and rows.width == 1
        if is_single:
            offsets, offsets_dev = self._slots.even_offsets(rows.slots.size)
        else:
            offsets = rows.cuts().astype(np.int32)
            offsets_dev = to_device(offsets)
        tables, tables_dev = self._block_tables(rows)
        seq_lens = rows.seq_lens.astype(np.int32)
        return AttentionBatch(
            num_seqs=rows.slots.size,
            num_tokens=int(positions.size),
            cu_seqlens_q=offsets,
            seq_lens=seq_lens,
            block_tables=tables,
            cu_seqlens_q_dev=offsets_dev,
            seq_lens_dev=to_device(seq_lens),
            block_tables_dev=tables_dev,
            slot_mapping=to_device(cache_slots),
            positions=to_device(positions),
            tokens_per_row=1 if is_single else 0,
        )

    def _rectangle(
        self, rows: StepRows, shape: StepShape, positions: np.ndarray, cache_slots: np.ndarray
    ) -> AttentionBatch:
        slots = self._slots
        tables = np.zeros((shape.rows, shape.blocks), dtype=np.int32)
        width = min(shape.blocks, slots.block_tables.shape[1])
        tables[: rows.slots.size, :width] = slots.block_tables[rows.slots, :width]
        seq_lens = shape.pad((rows.starts + shape.tokens).astype(np.int32))
        offsets = np.arange(shape.rows + 1, dtype=np.int32) * np.int32(shape.tokens)
        where = np.repeat(shape.pad(rows.starts), shape.tokens)  # padding: where its row begins
        where[shape.spread(rows, np.ones(positions.size, dtype=bool))] = positions
        mapping = shape.spread(rows, cache_slots, -1)
        made = AttentionBatch.upload(
            self._device.to_device, offsets, seq_lens, tables, mapping, where, shape.tokens
        )
        return replace(made, is_padded=True)

    def _input_ids(self, rows: StepRows, token_slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """From the host where it knows the token, else the newest one on the device."""
        xp, put, slots = self._xp, self._device.to_device, self._slots
        known = slots.token_ids[token_slots, positions].astype(np.int64)
        lacking = np.flatnonzero(rows.seq_lens > slots.num_known[rows.slots])
        if np.count_nonzero(rows.num_drafts):  # then all is known, and drafts stand after it
            lacking = lacking[:0]
        if not lacking.size and rows.shape is None:
            return put(known)
        asked, where = rows.slots[lacking], rows.cuts()[lacking]
        if not ((rows.counts[lacking] == 1) & slots.is_held[asked]).all():
            raise WorkerError(
                f"a step feeds tokens nobody knows: starts {rows.starts.tolist()}, "
                f"lengths {rows.seq_lens.tolist()}, known {slots.num_known[rows.slots].tolist()}"
            )
        newest = slots.state.newest
        if rows.shape is not None:
            shape = rows.shape
            on_host = put(shape.spread(rows, known))
            wanted = np.full(known.size, -1, dtype=np.int64)
            wanted[where] = asked
            wanted = shape.spread(rows, wanted, -1)
            on_device = xp.index_select(newest, 0, put(np.maximum(wanted, 0)))
            return xp.where(put(wanted >= 0), on_device, on_host)
        there = xp.index_select(newest, 0, put(asked))
        if lacking.size == known.size:
            return there
        input_ids = put(known)
        xp.index_copy_(input_ids, 0, put(where), there)
        return input_ids

    def _block_tables(self, rows: StepRows) -> tuple[np.ndarray, Tensor]:
        """Tables of the rows, no wider than the longest."""
        slots, kept = self._slots, self._tables
        width = max(1, -(-int(rows.seq_lens.max(initial=1)) // slots.block_size))
        if kept is not None and kept[0] is rows.slots and kept[1:3] == (slots.version, width):
            return kept[3], kept[4]
        host = slots.block_tables[rows.slots, :width]
        on_device = self._device.to_device(host)
        self._tables = (rows.slots, slots.version, width, host, on_device)
        return host, on_device


@dataclass(frozen=True, slots=True)
class StepShape:
    """One rectangle."""

    rows: int
    tokens: int  # of each row
    blocks: int  # of each row's table

    def spread(self, rows: StepRows, values: np.ndarray, nothing: int = 0) -> np.ndarray:
        """[rows * tokens]: one value for each of the step's tokens put where its token stands."""
        full = np.full(self.rows * self.tokens, nothing, dtype=values.dtype)
        first = np.arange(rows.slots.size) * self.tokens
        nth = np.arange(values.size) - np.repeat(rows.cuts()[:-1], rows.counts)
        full[np.repeat(first, rows.counts) + nth] = values
        return full

    def pad(self, values: np.ndarray, nothing: int = 0) -> np.ndarray:
        """[rows, ...]: one entry per row, and `nothing` for padding rows."""
        full = np.full((self.rows, *values.shape[1:]), nothing, dtype=values.dtype)
        full[: len(values)] = values
        return full


class StepShapes:
    """All shapes that steps of one engine can have, on a device that compiles each one."""

    def __init__(self, config: EngineConfig, buckets: StepBuckets) -> None:
        batch, speculative = config.batch, config.speculative
        self._block_size, self._longest = config.cache.block_size, config.model.max_model_len
        max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        most_rows = min(batch.max_num_seqs, max(buckets.decode_rows))
        most_prompts = min(batch.max_num_seqs, max(buckets.prompt_rows))
        most_tokens = min(batch.max_num_batched_tokens, self._longest, max(buckets.prompt_tokens))
        self._prompt_tokens = _up_to(buckets.prompt_tokens, most_tokens)
        self._prompt_rows = _up_to(buckets.prompt_rows, most_prompts)
        self._decode_rows = _up_to(buckets.decode_rows, most_rows)
        self._draft_width = 1 + max_drafts
        widest = self._blocks(self._longest - 1 + max(self._prompt_tokens[-1], 1 + max_drafts))
        self._blocks_wide = (*(b for b in buckets.table_blocks if b < widest), widest)

    def find(self, rows: StepRows) -> StepShape:
        """The smallest shape that holds the step."""
        longest = int(rows.counts.max(initial=1))
        if longest <= self._draft_width:
            tokens = 1 if longest == 1 else self._draft_width
            row_buckets = self._decode_rows
        else:
            tokens, row_buckets = _fit(self._prompt_tokens, longest, "tokens"), self._prompt_rows
        needed = self._blocks(int(rows.starts.max(initial=0)) + tokens)
        return StepShape(
            _fit(row_buckets, rows.slots.size, "rows"),
            tokens,
            _fit(self._blocks_wide, needed, "blocks per row"),
        )

    def __iter__(self) -> Iterator[tuple[StepShape, int, int]]:
        """Every shape with a start and a number of tokens of a row that is padded to it."""
        widths = [(1, 1)] if self._draft_width == 1 else [(1, 1), (self._draft_width, 2)]
        kinds = [(self._decode_rows, tokens, fewest) for tokens, fewest in widths]
        for before, tokens in pairwise((self._draft_width, *self._prompt_tokens)):
            if tokens > before:
                kinds.append((self._prompt_rows, tokens, before + 1))
        for row_buckets, tokens, count in kinds:
            for narrower, blocks in pairwise((0, *self._blocks_wide)):
                start = min(blocks * self._block_size - tokens, self._longest - count)
                if start < 0 or self._blocks(start + tokens) <= narrower:
                    continue  # no step of so many tokens has so narrow, or so wide, a table
                for rows in row_buckets:
                    yield StepShape(rows, tokens, blocks), start, count

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _up_to(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Those that are needed for at most so many."""
    ordered = sorted(buckets)
    last = next((b for b in ordered if b >= most), ordered[-1])
    return tuple(b for b in ordered if b <= last)


def _fit(buckets: tuple[int, ...], number: int, what: str) -> int:
    for bucket in buckets:
        if bucket >= number:
            return bucket
    raise WorkerError(f"a step has {number} {what}; the device takes at most {max(buckets)}")


class StepBuffers:
    """What a step of up to `num_tokens` tokens in `num_rows` rows is given; smaller ones use its
    beginning. longest: tokens of a row, with those of the step."""

    def __init__(
        self, device: DeviceBackend, num_tokens: int, num_rows: int, max_blocks: int, longest: int
    ) -> None:
        xp = self._xp = device.xp
        self._device, self._max_blocks, self._longest = device, max_blocks, longest
        self.num_rows = num_rows
        self.input_ids, self.positions = self.zeros(num_tokens), self.zeros(num_tokens)
        self.slot_mapping = self.zeros(num_tokens) - 1
        self.seq_lens = self.zeros(num_rows, dtype=xp.int32)
        self.tables = self.zeros(num_rows, max_blocks, dtype=xp.int32)

    def zeros(self, *shape: int, dtype: object = None) -> Tensor:
        """int64 unless said otherwise."""
        xp = self._xp
        return xp.zeros(shape, dtype=dtype or xp.int64, device=self._device.device)

    def attention(
        self,
        rows: int,
        tokens: int,
        starts: np.ndarray,
        starts_dev: Tensor,
        tokens_per_row: int = 0,
    ) -> AttentionBatch:
        """The batch of a captured step; the host's arrays are upper bounds."""
        return AttentionBatch(
            num_seqs=rows,
            num_tokens=tokens,
            cu_seqlens_q=starts,
            seq_lens=np.full(rows, self._longest, dtype=np.int32),
            block_tables=np.zeros((rows, self._max_blocks), dtype=np.int32),
            cu_seqlens_q_dev=starts_dev,
            seq_lens_dev=self.seq_lens[:rows],
            block_tables_dev=self.tables[:rows],
            slot_mapping=self.slot_mapping[:tokens],
            positions=self.positions[:tokens],
            tokens_per_row=tokens_per_row,
            is_exact=False,
        )


class DecodeBuffers(StepBuffers):
    """Of decode steps with `width` tokens per row, and what they leave for the host."""

    def __init__(
        self, device: DeviceBackend, max_rows: int, width: int, max_blocks: int, longest: int
    ) -> None:
        super().__init__(device, max_rows * width, max_rows, max_blocks, longest)
        self._width = width
        self._offsets = np.arange(max_rows + 1, dtype=np.int32) * np.int32(width)
        self._offsets_dev = device.to_device(self._offsets.copy())
        self.results = self.zeros(max_rows, width)
        # For drafters, where the step itself does not capture them: what was sampled, and where
        # each row's last kept token stands in it.
        self.sampled, self.last = self.zeros(max_rows * width), self.zeros(max_rows)
        self._results_of: dict[int, Tensor] = {}

    def results_of(self, num_rows: int) -> Tensor:
        """Those of the first rows; the same tensor each time."""
        found = self._results_of.get(num_rows)
        if found is None:
            found = self._results_of[num_rows] = self.results[:num_rows]
        return found

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of `size` rows."""
        starts, starts_dev = self._offsets[: size + 1], self._offsets_dev[: size + 1]
        return self.attention(size, size * self._width, starts, starts_dev, self._width)


class PromptBuffers(StepBuffers):
    """Of steps whose rows have any number of tokens."""

    def __init__(
        self, device: DeviceBackend, num_tokens: int, num_rows: int, max_blocks: int, longest: int
    ) -> None:
        super().__init__(device, num_tokens, num_rows, max_blocks, longest)
        self.starts = self.zeros(num_rows + 1, dtype=self._xp.int32)
        self.read_tokens = self.zeros(num_rows)  # ForwardContext.rows
        # For drafters, after the step: see DraftBatch.
        self.next_ids, self.last = self.zeros(num_tokens), self.zeros(num_rows)

    def clear(self) -> None:
        """New caches: no number of a former step stays, so one which runs now writes nothing."""
        for numbers in (self.starts, self.seq_lens, self.tables, self.read_tokens, self.last):
            numbers.zero_()
        self.slot_mapping.copy_(self._xp.zeros_like(self.slot_mapping) - 1)

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of up to `size` tokens."""
        rows = min(self.num_rows, size)
        starts = np.full(rows + 1, size, dtype=np.int32)
        starts[0] = 0
        return self.attention(rows, size, starts, self.starts[: rows + 1])

    def take(self, batch: AttentionBatch, input_ids: Tensor, size: int) -> None:
        """Queue the copies of a step's batch; what comes after it becomes padding."""
        tokens, rows = batch.num_tokens, batch.num_seqs
        last = min(self.num_rows, size)
        self.input_ids[:tokens] = input_ids
        self.positions[:tokens] = batch.positions
        self.slot_mapping[:tokens] = batch.slot_mapping
        if tokens < size:
            self.input_ids[tokens:size] = 0
            self.positions[tokens:size] = 0
            self.slot_mapping[tokens:size] = -1
        self.starts[: rows + 1] = batch.cu_seqlens_q_dev
        self.seq_lens[:rows] = batch.seq_lens_dev
        if rows < last:
            self.starts[rows + 1 : last + 1] = tokens
            self.seq_lens[rows:last] = 0
        width = int(batch.block_tables_dev.shape[1])
        self.tables[:rows, :width] = batch.block_tables_dev

    def take_sampled(self, next_ids: Tensor, last: Tensor) -> None:
        """Queue the copies of what a drafter is told of the step that was taken last."""
        tokens, rows = int(next_ids.shape[0]), int(last.shape[0])
        self.next_ids[:tokens] = next_ids
        self.last[:rows] = last
        if rows < self.num_rows:
            self.last[rows:] = 0  # of a larger step before
