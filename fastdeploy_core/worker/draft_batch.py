"""What a device drafter is shown after a step of the target, and the one-token steps it takes
itself.

All of it is known without waiting for the device, but on devices whose attention drivers need exact
lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.speculative import DraftBatch
from fastdeploy_core.layers.context import ForwardContext

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .graphs import CapturedDecode, CapturedPrompt
    from .slots import Slots
    from .step import StepRows, TargetStep


class DraftBatches:
    """Makes DraftBatch records of one rank."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        slots: Slots,
        first_layer: int,
    ) -> None:
        """Layers from `first_layer` on are the drafter's."""
        self._place = kernels["place_tokens"]
        self._device, self._xp, self._slots = device, device.xp, slots
        specs = list(dict.fromkeys(loaded.kv_layers[first_layer:]))
        self._drivers = {spec: loaded.attention[spec] for spec in specs}
        self._needs_exact = not all(d.can_capture_decode for d in self._drivers.values())
        self._offsets: dict[int, tuple[np.ndarray, Tensor]] = {}

    def make(
        self,
        rows: StepRows,
        step: TargetStep,
        drawn: Tensor | None,
        accepted: Tensor | None,
        max_drafts: int,
        draw: Callable[[Tensor, int], Tensor],
    ) -> DraftBatch:
        """drawn: [R] int64; accepted: [S] int64 of the rows that sample, None: there were no
        drafts."""
        at, context = rows.slots, step.context
        if context.batch is not step.attention:  # what a capture was made with, padding included
            context = self.context(step.attention, context.caches)
        return DraftBatch(
            seq_ids=self._slots.seq_ids[at],
            slots=at,
            draws=rows.samples,
            max_drafts=max_drafts,
            attention=step.attention,
            context=context,
            input_ids=step.input_ids,
            next_token_ids=self.next_ids(rows, step, drawn),
            hidden_states=step.hidden,
            last=self.last(rows, accepted),
            draw=draw,
            decode=_Decoder(self, rows, step, max_drafts).step,
        )

    def make_captured(
        self,
        captured: CapturedDecode,
        max_drafts: int,
        draw: Callable[[Tensor, int], Tensor],
        *,
        is_greedy: bool,
    ) -> DraftBatch:
        """After a captured step: of all its rows, and without the host. Padding rows have no room,
        so they write nothing."""
        xp, size, attention = self._xp, captured.size, captured.attention
        state = self._slots.state
        assert captured.context is not None
        rows = state.rows[:size]
        tables, caches = (
            (attention.block_tables, attention.block_tables_dev),
            captured.context.caches,
        )
        room: Tensor | None = None

        def decode(positions: Tensor) -> tuple[AttentionBatch, ForwardContext]:
            nonlocal room
            if room is None:
                room = xp.index_select(state.room, 0, rows)
            one_each = self.one_token_each(positions, room, *tables)
            return one_each, self.context(one_each, caches)

        num_known: Tensor | None = None
        if state.history is not None:
            num_known = xp.index_select(state.num_computed, 0, rows) + 1
        return DraftBatch(
            seq_ids=np.full(size, -1, dtype=np.int64),
            slots=np.full(size, -1, dtype=np.int64),
            draws=np.ones(size, dtype=bool),
            max_drafts=max_drafts,
            attention=attention,
            context=captured.context,
            input_ids=captured.input_ids,
            next_token_ids=captured.sampled,
            hidden_states=captured.hidden,
            last=captured.last,
            draw=draw,
            decode=decode,
            history=state.history,
            history_rows=rows,
            num_known=num_known,
            is_greedy=is_greedy,
        )

    def make_prompt(
        self, captured: CapturedPrompt, draw: Callable[[Tensor, int], Tensor]
    ) -> DraftBatch:
        """After a captured step with prompts, for a drafter that is to keep its cache complete."""
        attention = captured.attention
        assert captured.context is not None

        def decode(positions: Tensor) -> tuple[AttentionBatch, ForwardContext]:
            raise RuntimeError("no drafts are wanted after this step (DraftBatch.max_drafts is 0)")

        return DraftBatch(
            seq_ids=np.full(attention.num_seqs, -1, dtype=np.int64),
            slots=np.full(attention.num_seqs, -1, dtype=np.int64),
            draws=np.ones(attention.num_seqs, dtype=bool),
            max_drafts=0,
            attention=attention,
            context=captured.context,
            input_ids=captured.input_ids,
            next_token_ids=captured.next_ids,
            hidden_states=captured.hidden,
            last=captured.last,
            draw=draw,
            decode=decode,
        )

    def next_ids(self, rows: StepRows, step: TargetStep, drawn: Tensor | None) -> Tensor:
        """[T] the token after each one fed: of prompts as the host knows them, else what was
        sampled."""
        num_tokens = int(step.input_ids.shape[0])
        if drawn is not None and drawn.shape[0] == num_tokens:
            return drawn  # a token was sampled after every one fed
        store = self._slots
        token_slots = np.repeat(rows.slots, rows.counts)
        first = np.cumsum(rows.counts) - rows.counts
        positions = np.arange(token_slots.size) + np.repeat(rows.starts - first, rows.counts)
        following = np.zeros(num_tokens, dtype=np.int64)
        following[: token_slots.size] = store.token_ids[token_slots, positions + 1]
        ids = self._device.to_device(following)
        if drawn is not None:
            where = self._device.to_device(rows.positions().tokens)
            self._xp.index_copy_(ids, 0, where, drawn)
        return ids

    def last(self, rows: StepRows, accepted: Tensor | None) -> Tensor:
        """[B] index of each row's last verified token."""
        ends = np.cumsum(rows.counts) - 1
        if accepted is None:
            return self._device.to_device(ends.astype(np.int64))
        before = self._device.to_device((ends - rows.num_drafts).astype(np.int64))
        if rows.samples.all():
            return before + accepted
        where = self._device.to_device(np.flatnonzero(rows.samples))
        moved = self._xp.index_select(before, 0, where) + accepted
        return self._xp.index_copy_(before, 0, where, moved)

    def one_token_each(
        self, positions: Tensor, room: Tensor, tables: np.ndarray, tables_dev: Tensor
    ) -> AttentionBatch:
        """One token per row at these positions; rows without room for it write nothing."""
        size, num_rows = self._slots.block_size, int(positions.shape[0])
        where, slot_mapping, seq_lens = self._place(positions, room, tables_dev, size)
        host_lens = np.full(num_rows, tables.shape[1] * size, dtype=np.int32)
        if self._needs_exact:
            seq_lens = (where + 1).to(self._xp.int32)
            host_lens = self._device.to_host(seq_lens)
        offsets, offsets_dev = self._even_offsets(num_rows)
        return AttentionBatch(
            num_seqs=num_rows,
            num_tokens=num_rows,
            cu_seqlens_q=offsets,
            seq_lens=host_lens,
            block_tables=tables,
            cu_seqlens_q_dev=offsets_dev,
            seq_lens_dev=seq_lens,
            block_tables_dev=tables_dev,
            slot_mapping=slot_mapping,
            positions=where,
            tokens_per_row=1,
            is_exact=self._needs_exact,
        )

    def context(
        self, attention: AttentionBatch, caches: list[tuple[Tensor, ...]]
    ) -> ForwardContext:
        """For the drafter's layers."""
        metadata = {spec: driver.prepare(attention) for spec, driver in self._drivers.items()}
        return ForwardContext(attention, metadata, caches)

    def _even_offsets(self, num_rows: int) -> tuple[np.ndarray, Tensor]:
        if num_rows not in self._offsets:
            host = np.arange(num_rows + 1, dtype=np.int32)
            self._offsets[num_rows] = (host, self._device.to_device(host))
        return self._offsets[num_rows]

    def tables(self, rows: StepRows, more: int) -> tuple[np.ndarray, Tensor]:
        """Block tables wide enough for `more` tokens after the step's."""
        store = self._slots
        width = -(-(int(rows.seq_lens.max(initial=1)) + more) // store.block_size)
        host = store.block_tables[rows.slots, : min(width, store.block_tables.shape[1])]
        return host, self._device.to_device(host)

    def limits(self, rows: StepRows) -> Tensor:
        """[B] int64 on the device: tokens that a row's blocks hold; 0 for rows that do not draw."""
        store = self._slots
        held = np.minimum(store.num_blocks[rows.slots] * store.block_size, store.max_model_len)
        return self._device.to_device(np.where(rows.samples, held, 0))


class _Decoder:
    """DraftBatch.decode of one step; uploads what it needs at its first call."""

    def __init__(
        self, batches: DraftBatches, rows: StepRows, step: TargetStep, max_drafts: int
    ) -> None:
        self._slotses, self._rows, self._step, self._more = batches, rows, step, max_drafts
        self._limits: Tensor | None = None
        self._tables: tuple[np.ndarray, Any] | None = None

    def step(self, positions: Tensor) -> tuple[AttentionBatch, ForwardContext]:
        """One token per row at these positions."""
        batches = self._slotses
        if self._limits is None or self._tables is None:
            self._limits = batches.limits(self._rows)
            self._tables = batches.tables(self._rows, self._more)
        attention = batches.one_token_each(positions, self._limits, *self._tables)
        return attention, batches.context(attention, self._step.context.caches)
