"""What a device drafter is shown after a step of the target, and the one-token steps it takes
itself.

All of it is known without waiting for the device, but on devices whose attention drivers need exact
lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.speculative import DraftBatch
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.kvcache import bounded_rules
from fastdeploy_core.layers.context import ForwardContext

from .layout import place

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .graphs import CapturedDecode, CapturedPrompt
    from .slots import Slots
    from .step import Sampling, StepRows, TargetStep

# Tokens that each row's blocks hold, the rows' block tables on the host and on the device; slots.
_Places: TypeAlias = "tuple[Tensor, np.ndarray, Tensor, Tensor]"


class DraftBatches:
    """Makes DraftBatch records of one rank."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        slots: Slots,
        first_layer: int,
        offsets: Tensor | None = None,
    ) -> None:
        """Layers from `first_layer` on are the drafter's. offsets: see SequenceMedia."""
        self._place = kernels["place_tokens"]
        self._device, self._xp, self._slots = device, device.xp, slots
        specs = list(dict.fromkeys(loaded.builder.kv_layers[first_layer:]))
        if rules := bounded_rules(specs):
            raise ConfigError(
                f"the drafter has layers with a {rules[0].kind} of {rules[0].tokens} tokens, and "
                "its steps have one block table for all layers; possible: a drafter whose layers "
                f"need every token, or --max-model-len {rules[0].tokens}"
            )
        self._drivers = {spec: loaded.attention[spec] for spec in specs}
        # Layers that are not made for offsets are given places in the sequence as positions.
        self._offsets, has_own = offsets, any("offsets" in spec.needs for spec in specs)
        self.is_plain = offsets is not None and not has_own
        self._needs_exact = not all(d.can_capture_decode for d in self._drivers.values())

    def make(
        self,
        rows: StepRows,
        step: TargetStep,
        sampling: Sampling | None,
        max_drafts: int,
        draw: Callable[[Tensor, int], Tensor],
    ) -> DraftBatch:
        """After a step laid out on the host; sampling: None where no row samples."""
        store, at, indices = self._slots, rows.slots, step.attention.positions
        if self._offsets is not None:
            indices = self._device.to_device(place(rows, store)[1])
        attention, context = self._own(step.attention, step.context, indices)
        last = self.last(rows, sampling)
        width = -(-max(1, int(store.room[at].max(initial=1))) // store.block_size)

        def places() -> _Places:
            room = np.where(rows.samples, store.room[at], 0)
            tables, put = store.block_tables[at, :width], self._device.to_device
            return put(room), tables, put(tables), put(at)

        return DraftBatch(
            seq_ids=store.seq_ids[at],
            slots=at,
            draws=rows.samples,
            max_drafts=max_drafts,
            attention=attention,
            context=context,
            input_ids=step.input_ids,
            next_token_ids=self.next_ids(rows, step, sampling),
            hidden_states=step.hidden,
            last=last,
            draw=draw,
            decode=self._decoder(places, context),
            ends=self._xp.index_select(indices, 0, last),
        )

    def make_captured(
        self,
        captured: CapturedDecode | CapturedPrompt,
        next_ids: Tensor,
        max_drafts: int,
        draw: Callable[[Tensor, int], Tensor],
    ) -> DraftBatch:
        """After a captured step: of all its rows, and without the host. Padding rows have no room,
        so they write nothing. With prompts no drafts are wanted: a drafter is to keep its cache
        complete."""
        assert captured.context is not None
        attention, context = self._own(captured.attention, captured.context, captured.indices)
        state, nobody = self._slots.state, np.full(attention.num_seqs, -1)
        rows = state.rows[: attention.num_seqs]

        def places() -> _Places:
            if not max_drafts:
                raise RuntimeError("no drafts are wanted after this step (max_drafts is 0)")
            room = self._xp.index_select(state.room, 0, rows)
            return room, attention.block_tables, attention.block_tables_dev, rows

        return DraftBatch(
            seq_ids=nobody,
            slots=nobody,
            draws=nobody < 0,
            max_drafts=max_drafts,
            attention=attention,
            context=context,
            input_ids=captured.input_ids,
            next_token_ids=next_ids,
            hidden_states=captured.hidden,
            last=captured.last,
            draw=draw,
            decode=self._decoder(places, context),
            ends=self._xp.index_select(captured.indices, 0, captured.last),
        )

    def next_ids(self, rows: StepRows, step: TargetStep, sampling: Sampling | None) -> Tensor:
        """[T] the token after each one fed: as the host knows prompts, else what was sampled."""
        num_tokens = int(step.input_ids.shape[0])
        sampled: Tensor | None = None if sampling is None else sampling.token_ids
        if sampled is not None and sampled.shape[0] == num_tokens:
            return sampled  # a token was sampled after every one fed
        store = self._slots
        token_slots, positions, _ = place(rows, store)
        following = np.zeros(num_tokens, dtype=np.int64)
        following[: token_slots.size] = store.token_ids[token_slots, positions + 1]
        ids = self._device.to_device(following)
        if sampled is not None:
            where = self._device.to_device(rows.positions().tokens)
            self._xp.index_copy_(ids, 0, where, sampled)
        return ids

    def last(self, rows: StepRows, sampling: Sampling | None) -> Tensor:
        """[B] index of each row's last verified token."""
        ends = np.cumsum(rows.counts) - 1
        accepted = None if sampling is None else sampling.accepted
        if accepted is None:
            return self._device.to_device(ends.astype(np.int64))
        before = self._device.to_device((ends - rows.num_drafts).astype(np.int64))
        if rows.samples.all():
            return before + accepted
        where = self._device.to_device(np.flatnonzero(rows.samples))
        moved = self._xp.index_select(before, 0, where) + accepted
        return self._xp.index_copy_(before, 0, where, moved)

    def _decoder(
        self, places: Callable[[], _Places], context: ForwardContext
    ) -> Callable[[Tensor], tuple[AttentionBatch, ForwardContext]]:
        """DraftBatch.decode. places: asked at its first call."""
        known: list[_Places] = []

        def decode(indices: Tensor) -> tuple[AttentionBatch, ForwardContext]:
            known.extend(() if known else [places()])
            attention = self._one_token_each(indices, *known)
            return attention, self._context(attention, context.caches)

        return decode

    def _own(
        self, attention: AttentionBatch, context: ForwardContext, indices: Tensor
    ) -> tuple[AttentionBatch, ForwardContext]:
        """The target's step as the drafter's layers see it."""
        if self.is_plain:
            attention = replace(attention, positions=indices)
        if context.batch is not attention:  # or what a capture was made with, padding included
            context = replace(self._context(attention, context.caches), kept=context.kept)
        return attention, context

    def _one_token_each(self, indices: Tensor, places: _Places) -> AttentionBatch:
        """One token per row at these indices; rows without room for it write nothing."""
        size, num_rows, xp = self._slots.block_size, int(indices.shape[0]), self._xp
        room, tables, tables_dev, slots = places
        where, slot_mapping, seq_lens = self._place(indices, room, tables_dev, size)
        positions = where
        if self._offsets is not None and not self.is_plain:
            moved = where + xp.index_select(self._offsets, 0, slots)
            positions = xp.clamp(moved, 0)  # of rows that have no room, too
        host_lens = np.full(num_rows, tables.shape[1] * size, dtype=np.int32)
        if self._needs_exact:
            seq_lens = (where + 1).to(xp.int32)
            host_lens = self._device.to_host(seq_lens)
        offsets, offsets_dev = self._slots.even_offsets(num_rows)
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
            positions=positions,
            tokens_per_row=1,
            is_exact=self._needs_exact,
        )

    def _context(
        self, attention: AttentionBatch, caches: list[tuple[Tensor, ...]]
    ) -> ForwardContext:
        """For the drafter's layers."""
        metadata = {spec: driver.prepare(attention) for spec, driver in self._drivers.items()}
        return ForwardContext(attention, metadata, caches)
