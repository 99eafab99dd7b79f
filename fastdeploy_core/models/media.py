"""Pictures of sequences on one rank: their vectors, and positions that are not tokens' indices.

A picture is encoded in the step whose tokens first need it. Its vectors stay until its last token
was fed, and after that until others need their place; so it is encoded once however its prompt is
cut. Every rank encodes by itself, and all decide alike: the step's message decides.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.layers.context import EmbeddedRows
from fastdeploy_core.types import EmbeddedSpan, MediaItem, NewSequence, SequenceExtras

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

FEATURES = frozenset({"embeddings", "positions"})  # of contracts.model.MODEL_FEATURES, served here


@dataclass(slots=True)
class _Brought:
    """What one sequence brings, as far as it has yet to be fed."""

    spans: list[EmbeddedSpan]
    items: dict[bytes, MediaItem]
    positions: np.ndarray  # [3, num_prompt_tokens]; [3, 0] where they are the tokens' indices


class CapturedVectors:
    """What captured steps read of vectors and of positions on three axes, in buffers for up to
    `most` tokens. axes: positions are on three. See MultimodalLM.vector_width."""

    def __init__(
        self, device: DeviceBackend, dtype: str, width: int, hidden: int, most: int, *, axes: bool
    ) -> None:
        xp, where = device.xp, device.device
        self._hidden, self._width = hidden, width
        self._vectors = xp.zeros((most, width), dtype=xp.dtype(dtype), device=where)
        self._tokens = xp.zeros((most,), dtype=xp.int64, device=where)
        self._places = device.to_device(np.arange(most)) if axes else None
        self._axes = xp.zeros((3, most), dtype=xp.int64, device=where) if axes else None

    def of(self, size: int) -> tuple[EmbeddedRows, Tensor | None]:
        """What a step of up to `size` tokens is captured with, and its positions [3, size]."""
        axes = None if self._axes is None else self._axes[:, :size]
        return EmbeddedRows(self._tokens[:size], self._vectors[:size]), axes

    def take(self, embedded: EmbeddedRows, axes: Tensor | None, positions: Tensor) -> None:
        """Queue the copies of a step. axes: see LaidOut. positions: [size], the captured step's;
        where they are on three axes they become rows of the step's own table."""
        size, count = int(positions.shape[0]), int(embedded.tokens.shape[0])
        self._tokens[:count], self._vectors[:count] = embedded.tokens, embedded.vectors
        if count < size:
            # In the same place the same vector changes nothing, nor do zeros that are added.
            self._tokens[count:size] = embedded.tokens[:1]
            self._vectors[count:size] = embedded.vectors[:1]
            if self._hidden < self._width:
                self._vectors[count:size, self._hidden :] = 0
        if self._axes is not None and self._places is not None:
            self._axes[:, :size] = positions
            if axes is not None:
                self._axes[:, : int(axes.shape[1])] = axes
            positions.copy_(self._places[:size])


class SequenceMedia:
    """By slot what sequences bring; and the vectors of pictures, by digest. `max_rows` vectors are
    kept for other sequences; what running ones still need is kept in any case."""

    def __init__(self, device: DeviceBackend, model: Any, num_slots: int, max_rows: int) -> None:
        self._device, self._xp, self._model, self._max_rows = device, device.xp, model, max_rows
        self._brought: dict[int, _Brought] = {}
        self._offsets = np.zeros(num_slots, dtype=np.int64)
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._used_by: Counter[bytes] = Counter()  # spans that have yet to be fed
        self.num_encoded = 0  # items so far
        self.features = FEATURES & model.features  # what sequences may bring
        # [num_slots + 1] int64 for captured steps, of which the last is of padding rows: what to
        # add to the indices of tokens after a prompt; None: nothing to any.
        self.offsets: Tensor | None = None
        if "positions" in self.features:
            shape, xp = (num_slots + 1,), device.xp
            self.offsets = xp.zeros(shape, dtype=xp.int64, device=device.device)

    def captured(self, dtype: str, hidden: int, most: int) -> CapturedVectors | None:
        """Buffers for captured steps of up to `most` tokens; None: the family cannot be captured in
        steps with vectors."""
        width, axes = getattr(self._model, "vector_width", 0), self.offsets is not None
        made_of = self._device, dtype, width, hidden, most
        return CapturedVectors(*made_of, axes=axes) if width else None

    def bring_largest(self, prompts: Sequence[NewSequence], config: EngineConfig) -> None:
        """These made-up prompts bring as many pictures of the largest size as a step encodes, if
        the family makes them up, and the device is not this processor, which would take minutes."""
        if self._device.limits.shares_host_memory:
            return
        asked, model = config.media, config.model
        rules = MediaRules(asked.limit_mm_per_prompt, is_trusted=True)
        processor = self._model.media(model.hf_config, model.path, rules)
        make = getattr(processor, "largest", None)
        rows = asked.max_encode_tokens or config.batch.max_num_batched_tokens
        items: list[MediaItem] = [] if make is None else make(rows, model.max_model_len)
        for new in prompts if items else ():
            spans, own, end, length = list[EmbeddedSpan](), list[MediaItem](), 0, len(new.token_ids)
            while items and (not end or end + items[-1].num_rows <= length):
                own.append(items.pop())
                spans.append(EmbeddedSpan(end, min(own[-1].num_rows, length), own[-1].digest))
                end += spans[-1].count
            # Not the same on all axes, as those of pictures.
            places = np.arange(length, dtype=np.int32) // np.array([[1], [2], [3]], dtype=np.int32)
            positions = places.tobytes() if "positions" in self.features else b""
            new.extras = SequenceExtras(embeddings=spans, media=own, positions=positions)

    def add(self, slot: int, extras: SequenceExtras) -> None:
        """A sequence has got this slot, and brings something."""
        self._move(slot, extras.position_offset)
        positions = np.frombuffer(extras.positions, dtype=np.int32).reshape(3, -1)
        items = {item.digest: item for item in extras.media}
        self._brought[slot] = _Brought(list(extras.embeddings), items, positions)
        self._used_by.update(span.digest for span in extras.embeddings)

    def reset(self, slot: int) -> None:
        """The slot is free."""
        self._move(slot, 0)
        gone = self._brought.pop(slot, None)
        if gone is not None:
            self._let_go(gone.spans)

    def _move(self, slot: int, offset: int) -> None:
        if self.offsets is None or self._offsets[slot] == offset:
            return
        self._offsets[slot] = offset
        self.offsets[slot : slot + 1] = self._device.to_device(np.array([offset]))

    def positions(
        self, token_slots: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """[T] of each token that is fed, from its place in its sequence; and [3, T] where they are
        not the same on all axes: the first are row numbers of a table of this step then."""
        moved: np.ndarray = indices + self._offsets[token_slots]
        axes: np.ndarray | None = None
        for slot, brought in self._brought.items():
            own = brought.positions
            where = np.flatnonzero((token_slots == slot) & (indices < own.shape[1]))
            if where.size:
                axes = np.tile(moved, (3, 1)) if axes is None else axes
                axes[:, where] = own[:, indices[where]]
        if axes is None:
            return moved, None
        if (axes == axes[0]).all():
            return axes[0], None
        return np.arange(moved.size), axes

    def embedded(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, first_tokens: np.ndarray
    ) -> EmbeddedRows | None:
        """Vectors for this step's tokens, encoded now where they are not there; None: it needs
        none. What the step feeds is forgotten here. [B] each: the rows' slots, where in its
        sequence each begins, its tokens, and which of the step's tokens is its first."""
        if not self._brought:
            return None
        wanted: list[tuple[int, bytes, int, int]] = []  # step's token, digest, first row, count
        missing: dict[bytes, MediaItem] = {}
        fed: list[EmbeddedSpan] = []
        for slot, start, count, token in zip(
            *(x.tolist() for x in (slots, starts, counts, first_tokens)), strict=True
        ):
            brought, end = self._brought.get(slot), start + count
            if brought is None:
                continue
            for span in brought.spans:
                first, last = max(start, span.start), min(end, span.start + span.count)
                if first >= last:
                    continue
                nth = span.first_row + first - span.start
                wanted.append((token + first - start, span.digest, nth, last - first))
                if span.digest not in self._vectors:
                    missing[span.digest] = brought.items[span.digest]
            fed += [span for span in brought.spans if span.start + span.count <= end]
            brought.spans = [span for span in brought.spans if span.start + span.count > end]
            if end >= brought.positions.shape[1] and not brought.spans:
                del self._brought[slot]
        found = self._gather(wanted, list(missing.values())) if wanted else None
        self._let_go(fed)
        self._drop_unused()
        return found

    def _gather(
        self, wanted: list[tuple[int, bytes, int, int]], missing: list[MediaItem]
    ) -> EmbeddedRows:
        self._encode(missing)
        for _, digest, _, _ in wanted:
            self._vectors.move_to_end(digest)
        parts = [self._vectors[digest][nth : nth + count] for _, digest, nth, count in wanted]
        tokens = np.concatenate([np.arange(t, t + count) for t, _, _, count in wanted])
        return EmbeddedRows(self._device.to_device(tokens), self._xp.cat(parts))

    def _encode(self, items: list[MediaItem]) -> None:
        if not items:
            return
        rows, expected = self._model.encode(items), sum(item.num_rows for item in items)
        if int(rows.shape[0]) != expected:
            raise WorkerError(
                f"{type(self._model).__name__}.encode returned {int(rows.shape[0])} vectors for "
                f"items of {expected}"
            )
        self.num_encoded += len(items)
        first = 0
        for item in items:
            # A copy: a part would keep the vectors of all items of the call.
            self._vectors[item.digest] = rows[first : first + item.num_rows].clone()
            first += item.num_rows

    def _drop_unused(self) -> None:
        num_rows = sum(int(vectors.shape[0]) for vectors in self._vectors.values())
        for digest in [d for d in self._vectors if d not in self._used_by]:
            if num_rows <= self._max_rows:
                break
            num_rows -= int(self._vectors.pop(digest).shape[0])

    def _let_go(self, spans: list[EmbeddedSpan]) -> None:
        for span in spans:
            self._used_by[span.digest] -= 1
            if not self._used_by[span.digest]:
                del self._used_by[span.digest]
