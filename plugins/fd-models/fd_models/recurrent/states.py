"""Driver `plain` of layers that keep a state: plain tensor code on any device, and the answer that
it gives at start-up. What it computes is in recurrences.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import CapabilityError

from .recurrences import Chunks, causal, convolve, softplus, step, unit

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, StateSpec, StateWeights
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class _Rows:
    """Rows that are computed at once."""

    tokens: Tensor | slice  # of the step
    sources: Tensor  # [R] int64: places that the states are read from
    targets: Tensor  # [R] int64: and left in
    is_new: Tensor  # [R] bool: begins with zeros
    chunks: Chunks | None  # of a single row with several tokens; None: one token a row
    is_any: Tensor | None = None  # bool: there is a row at all; None: there is


class PlainStates:
    """Rows of few tokens together, one token after the other; longer ones by themselves in chunks.

    With drafts a block has places for spec.kept states, one after the other in a ring: that after
    the first n tokens is at n % kept. So refused drafts take nothing away that is needed again.
    """

    name = "plain"
    contract = (1, 5)
    can_capture_decode = True
    can_capture_mixed = False
    features = frozenset({"delta", "channel_delta", "space", "short_conv", "kept"})

    def __init__(
        self, spec: StateSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size = spec, block_size
        self._device, self._xp = device, device.xp
        self._dtype = device.xp.dtype(spec.dtype)
        self._has_state = spec.kind != "short_conv"
        self._places = max(1, spec.kept)  # of states in a block
        # There one graph of the most rows serves all, and here padding rows cost what others do.
        self.can_capture_decode = not device.limits.graph_any_size
        self._seen = causal(device)

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """The state and the last inputs of the convolution, of each place."""
        spec = self.spec
        block = (num_blocks, spec.kept) if spec.kept else (num_blocks,)
        conv = (*block, spec.conv_width - 1, sum(spec.conv_parts))
        if not self._has_state:
            return (conv,)
        return (*block, spec.num_heads, spec.key_dim, spec.value_dim), conv

    def prepare(self, batch: AttentionBatch) -> list[_Rows]:
        """Which rows are computed at once, and where their states lie."""
        if batch.is_padded or (not batch.is_exact and not 0 < batch.tokens_per_row <= self._places):
            raise CapabilityError(
                "state driver 'plain' takes steps as they come and captured ones of up to "
                f"{self._places} tokens per row, and this one is "
                f"{'padded' if batch.is_padded else 'captured'} with {batch.tokens_per_row}; "
                "possible: a state driver of the device"
            )
        if not batch.is_exact:
            return self._captured(batch)
        firsts = batch.cu_seqlens_q[:-1].astype(np.int64)
        counts = batch.cu_seqlens_q[1:].astype(np.int64) - firsts
        starts, made = batch.seq_lens.astype(np.int64) - counts, []
        short = np.flatnonzero((counts > 0) & (counts <= self._places))
        for nth in range(int(counts[short].max(initial=0))):
            rows = short[counts[short] > nth]
            is_all = rows.size == batch.num_tokens
            tokens = slice(0, rows.size) if is_all else self._device.to_device(firsts[rows] + nth)
            made.append(self._rows(batch, rows, tokens, starts[rows] + nth, 1))
        for row in np.flatnonzero(counts > self._places).tolist():
            count, own = int(counts[row]), np.array([row])
            tokens = slice(int(firsts[row]), int(firsts[row]) + count)
            made.append(self._rows(batch, own, tokens, starts[own], count))
        return made

    def _rows(
        self,
        batch: AttentionBatch,
        rows: np.ndarray,
        tokens: Tensor | slice,
        starts: np.ndarray,
        count: int,
    ) -> _Rows:
        """`count` tokens of each of these rows, after the `starts` first ones."""

        def place_of(lengths: np.ndarray) -> np.ndarray:
            """[R]: of the state after so many tokens of each row."""
            entries = np.maximum(lengths - 1, 0) // self._block_size
            blocks: np.ndarray = batch.block_tables[rows, entries].astype(np.int64)
            places: np.ndarray = blocks * self._places + lengths % self._places
            return places

        put, targets = self._device.to_device, place_of(starts + count)
        sources = np.where(starts > 0, place_of(starts), targets)
        chunks = None
        if count > 1:
            chunks = Chunks(self._device, self._seen, count, int(starts[0]))
        return _Rows(tokens, put(sources), put(targets), put(starts == 0), chunks)

    def _captured(self, batch: AttentionBatch) -> list[_Rows]:
        """Some tokens a row, by the device's numbers alone. Padding does again what its row's first
        token did, and padding rows what the first row of somebody does, so that every place is
        written with what belongs there."""
        xp, width = self._xp, batch.tokens_per_row
        lengths = batch.seq_lens_dev.to(xp.int64)
        is_row = (lengths > 0).to(xp.int64)
        own = xp.arange(batch.num_seqs, dtype=xp.int64, device=self._device.device)
        rows = own * is_row + xp.argmax(is_row, dim=0) * (1 - is_row)
        starts = xp.index_select(lengths, 0, rows) - width
        tables = xp.index_select(batch.block_tables_dev, 0, rows)
        is_any, made = is_row.sum() > 0, []

        def place_of(lengths: Tensor) -> Tensor:
            """[R] int64: of the state after so many tokens of each row."""
            entry = xp.clamp(lengths - 1, 0, None) // self._block_size
            blocks = xp.gather(tables, 1, entry.unsqueeze(1)).squeeze(1).to(xp.int64)
            return blocks * self._places + lengths % self._places

        for nth in range(width):
            tokens = rows * width
            if nth:
                fed = xp.index_select(batch.slot_mapping, 0, tokens + nth) >= 0
                tokens = tokens + nth * fed.to(xp.int64)
            begun = xp.clamp(starts + tokens - rows * width, 0, None)  # below 0 without any row
            places = (place_of(begun), place_of(begun + 1))
            made.append(_Rows(tokens, *places, begun == 0, None, is_any))
        return made

    def forward(
        self,
        x: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        weights: StateWeights,
        cache: tuple[Tensor, ...],
        metadata: list[_Rows],
    ) -> Tensor:
        """As StateBackend.forward says."""
        xp, spec = self._xp, self.spec
        width = spec.num_heads * spec.value_dim if self._has_state else sum(spec.conv_parts)
        out = xp.zeros([x.shape[0], width], dtype=self._dtype, device=self._device.device)
        if self.spec.kept:
            cache = tuple(kept.reshape([-1, *kept.shape[2:]]) for kept in cache)
        for rows in metadata:
            convolved = self._convolve(_take(xp, x, rows.tokens), rows, weights, cache[-1])
            y = convolved
            if dt is not None:
                rate = None if beta is None else _take(xp, beta, rows.tokens)
                gates = (_take(xp, dt, rows.tokens), rate)
                y = self._recur(xp.silu(convolved), *gates, weights, rows, cache[0])
            y = y.to(self._dtype)
            if isinstance(rows.tokens, slice):
                out[rows.tokens] = y
            else:
                xp.index_copy_(out, 0, rows.tokens, y)
        return out

    def _old(self, kept: Tensor, rows: _Rows) -> Tensor:
        """What the rows' places hold, zeros for rows that begin."""
        found = self._xp.index_select(kept, 0, rows.sources)
        is_new = rows.is_new.reshape([-1] + [1] * (found.ndim - 1))
        return self._xp.where(is_new, self._xp.zeros_like(found), found)

    def _leave(self, kept: Tensor, rows: _Rows, new: Tensor) -> None:
        """Into the rows' places."""
        xp = self._xp
        if rows.is_any is not None:
            new = xp.where(rows.is_any, new, xp.index_select(kept, 0, rows.targets))
        xp.index_copy_(kept, 0, rows.targets, new)

    def _convolve(self, x: Tensor, rows: _Rows, weights: StateWeights, kept: Tensor) -> Tensor:
        """[tokens, channels] float32."""
        xp, count = self._xp, 1 if rows.chunks is None else int(x.shape[0])
        both = xp.cat([self._old(kept, rows), x.reshape([-1, count, x.shape[1]])], 1)
        self._leave(kept, rows, both[:, count:].contiguous())
        bias = None if weights.conv_bias is None else weights.conv_bias.float()
        y = convolve(both.float(), weights.conv.float(), bias, count)
        return y.reshape([-1, y.shape[2]])

    def _recur(
        self,
        x: Tensor,
        dt: Tensor,
        beta: Any,
        weights: StateWeights,
        rows: _Rows,
        kept: Tensor,
    ) -> Tensor:
        """[tokens, num_heads * value_dim] float32. x: convolved, [tokens, channels]."""
        xp, spec = self._xp, self.spec
        decay: Any = weights.decay
        parts = [p.reshape([p.shape[0], -1]) for p in xp.split(x, list(spec.conv_parts), -1)]
        t = softplus(xp, dt.float() + weights.dt_bias)
        # Of each head one number, or one of each row of its state.
        g, b = decay.unsqueeze(-1) * t.reshape([t.shape[0], spec.num_heads, -1]), None
        if spec.kind in ("delta", "channel_delta"):
            q, k, v = self._keys(parts[0]), self._keys(parts[1]), self._values(parts[2])
            q, k = unit(xp, q) * spec.key_dim**-0.5, unit(xp, k)
            b, added = xp.sigmoid(beta.float()), v
        else:
            v, k, q = self._values(parts[0]), self._keys(parts[1]), self._keys(parts[2])
            added = v * t.unsqueeze(-1)
        old = self._old(kept, rows).float()
        if rows.chunks is None:
            y, new = step(old, q, k, added, g, b)
        else:
            y, state = rows.chunks.scan(old[0], q, k, added, g, b)
            new = state.unsqueeze(0)
        self._leave(kept, rows, new.to(kept.dtype))
        if weights.skip is not None:
            y = y + v * weights.skip.unsqueeze(-1)
        return y.reshape([y.shape[0], -1])

    def _keys(self, x: Tensor) -> Tensor:
        """[tokens, num_heads, key_dim]: a key head for each head."""
        spec = self.spec
        heads = x.reshape([x.shape[0], spec.num_key_heads, spec.key_dim])
        return self._xp.repeat_interleave(heads, spec.num_heads // spec.num_key_heads, 1)

    def _values(self, x: Tensor) -> Tensor:
        return x.reshape([x.shape[0], self.spec.num_heads, self.spec.value_dim])


def _take(xp: Any, x: Tensor, tokens: Tensor | slice) -> Tensor:
    return x[tokens] if isinstance(tokens, slice) else xp.index_select(x, 0, tokens)
