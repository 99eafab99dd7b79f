"""A processor that captures work, to test captured steps without an accelerator.

A captured graph is the closure itself, called again at each replay over the same buffers.
`RecordedWork` counts replays and lets a test inspect or overwrite buffers in between; copies and
events are counted, too. `RecordableAttention` reads lengths and tables from device tensors only, as
captured steps need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.device import CapturedGraph, DeviceOptions
from fastdeploy_core.reference.device import CpuDevice

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.plugins.resolved import ResolvedPlugins
    from fastdeploy_core.tensor import Tensor


class CapturingDevice(CpuDevice):
    """The reference device with graphs."""

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = replace(self.limits, graph_capture=True, graph_collectives=True)
        self.recorded: list[RecordedWork] = []
        self.before_replay: Callable[[], None] | None = None
        self.current: RecordedWork | None = None  # the one being replayed
        self.num_uploads = self.num_downloads = self.num_copies = 0

    def to_device(self, array: np.ndarray) -> Tensor:
        """Counted; always a copy, because a device may take the array later."""
        self.num_copies += 1
        return super().to_device(array.copy())

    def to_host(self, x: Tensor) -> np.ndarray:
        """Counted: each of these would wait for the device."""
        self.num_copies += 1
        return super().to_host(x)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Counted."""
        self.num_uploads += 1
        super().upload(source, target)

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Counted."""
        if not source.is_contiguous():
            raise RuntimeError("a device copies memory as it lies, and this is not in one piece")
        self.num_downloads += 1
        super().download(source, target)

    def capture(self, run: Callable[[], None], beside: CapturedGraph | None = None) -> RecordedWork:
        """`run` is called once, as a device does to record it."""
        work = RecordedWork(self, run)
        run()
        self.recorded.append(work)
        return work


class RecordedWork:
    """See CapturedGraph."""

    def __init__(self, device: CapturingDevice, run: Callable[[], None]) -> None:
        self._device, self._run = device, run
        self.num_replays = 0

    def replay(self) -> None:
        """Everything again."""
        self._device.current = self
        if self._device.before_replay is not None:
            self._device.before_replay()
        self.num_replays += 1
        self._run()


@dataclass(slots=True)
class _Metadata:
    """One entry per token fed, or none where the token belongs to no row."""

    num_tokens: int  # those that belong to rows; what follows is padding
    slots: Tensor  # [rows, keys] int64: where each key of a row lies in the cache
    rows: Tensor  # [num_tokens] int64
    hidden: Tensor  # [num_tokens, keys] bool: keys the token does not see
    foreign: Tensor  # [rows, keys] bool: in front of what the row needs, or after what was written


class RecordableAttention:
    """Grouped-query and latent attention over whole tables: slow, plain, no host numbers but
    shapes."""

    name = "recordable"
    contract = CONTRACT
    unit: Literal["core", "rope_kv"] = "core"
    can_capture_decode = True
    can_capture_mixed = False
    features = frozenset({"window", "chunk", "sinks", "softcap"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self.block_size, self._xp, self._device = spec, block_size, device.xp, device

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values; of latent attention rows that are both."""
        spec = self.spec
        shape = (num_blocks, self.block_size, spec.num_kv_heads)
        dims = (spec.head_dim,) if spec.kind == "mla" else (spec.head_dim, spec.v_head_dim)
        return tuple((*shape, dim) for dim in dims)

    def prepare(self, batch: AttentionBatch) -> _Metadata:
        """Which keys each token sees."""
        xp, device = self._xp, self._device.device
        counts = np.diff(batch.cu_seqlens_q).astype(np.int64)
        num_tokens = int(counts.sum())
        of_token = np.repeat(np.arange(batch.num_seqs), counts)
        nth_last = np.repeat(batch.cu_seqlens_q[1:].astype(np.int64), counts) - np.arange(
            num_tokens
        )
        rows, nth_last_dev = xp.from_numpy(of_token), xp.from_numpy(nth_last)
        width = batch.block_tables.shape[1] * self.block_size
        where = xp.arange(width, dtype=xp.int64, device=device)
        tables = batch.block_tables_dev.to(xp.int64)
        block = xp.index_select(tables, 1, where // self.block_size)
        lengths = batch.seq_lens_dev.to(xp.int64)
        own = xp.index_select(lengths, 0, rows) - nth_last_dev
        is_padding = (batch.slot_mapping[:num_tokens] < 0).to(xp.int64)
        num_padding = xp.index_add_(xp.zeros_like(lengths), 0, rows, is_padding)
        keys = where.unsqueeze(0)
        hidden = keys > own.unsqueeze(1)
        foreign = keys >= (lengths - num_padding).unsqueeze(1)
        if self.spec.window or self.spec.chunk:
            hidden = hidden | (keys < self._first_seen(own).unsqueeze(1))
            earliest = lengths - xp.from_numpy(counts)
            foreign = foreign | (keys < self._first_seen(earliest).unsqueeze(1))
        return _Metadata(
            num_tokens=num_tokens,
            slots=block * self.block_size + where % self.block_size,
            rows=rows,
            hidden=hidden,
            foreign=foreign,
        )

    def _first_seen(self, tokens: Tensor) -> Tensor:
        """Index of the first key that each of these tokens sees, of a window or a chunk."""
        if self.spec.chunk:
            return tokens // self.spec.chunk * self.spec.chunk
        return tokens - (self.spec.window - 1)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: _Metadata,
        rotary: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim], or kv_lora_rank instead."""
        xp, spec, fed = self._xp, self.spec, metadata.num_tokens
        is_latent = spec.kind == "mla"
        value_dim = spec.kv_lora_rank if is_latent else spec.v_head_dim
        group = spec.num_heads // spec.num_kv_heads
        rows, keys = metadata.slots.shape
        gone = metadata.foreign.unsqueeze(2).unsqueeze(3)

        def load(pool: Tensor, dim: int) -> Tensor:
            flat = pool.view([-1, spec.num_kv_heads * dim])
            found = xp.index_select(flat, 0, metadata.slots.reshape([-1]))
            found = found.reshape([rows, keys, spec.num_kv_heads, dim])
            found = xp.where(gone, xp.zeros_like(found), found)
            found = xp.index_select(found, 0, metadata.rows).transpose(1, 2)
            return xp.repeat_interleave(found, group, 1)

        queries = (q[:fed] * spec.scale).unsqueeze(2)
        seen = load(cache[0], spec.head_dim)
        scores = xp.matmul_nt(queries, seen).squeeze(2)
        if spec.softcap:
            scores = xp.tanh(scores / spec.softcap) * spec.softcap
        never = xp.full([1], -1e30, dtype=scores.dtype, device=self._device.device)
        scores = xp.where(metadata.hidden.unsqueeze(1), never, scores)
        if sinks is not None:
            column = sinks.reshape([1, -1, 1]) + xp.zeros_like(scores[:, :, :1])
            scores = xp.cat((scores, column), -1)
        weights = xp.softmax(scores, -1)[:, :, :keys].unsqueeze(2)
        values = seen[:, :, :, :value_dim] if is_latent else load(cache[1], value_dim)
        out = xp.matmul(weights, values).reshape([fed, spec.num_heads * value_dim])
        missing = q.shape[0] - fed
        if not missing:
            return out
        padding = xp.zeros([missing, out.shape[1]], dtype=out.dtype, device=self._device.device)
        return xp.cat((out, padding), 0)


class RecordablePrompts(RecordableAttention):
    """Steps of any rows, of which the host knows nothing."""

    can_capture_mixed = True

    def prepare(self, batch: Any) -> _Metadata:
        if batch.is_exact or batch.tokens_per_row:
            return super().prepare(batch)
        xp, device = self._xp, self._device.device
        token = xp.arange(batch.num_tokens, dtype=xp.int64, device=device)
        starts = batch.cu_seqlens_q_dev.to(xp.int64)
        behind = starts[1:].unsqueeze(0) <= token.unsqueeze(1)
        row = behind.to(xp.int64).sum(-1)
        row = xp.where(row < batch.num_seqs, row, xp.zeros_like(row))
        nth_last = xp.index_select(starts, 0, row + 1) - token
        width = batch.block_tables.shape[1] * self.block_size
        where = xp.arange(width, dtype=xp.int64, device=device)
        tables = batch.block_tables_dev.to(xp.int64)
        block = xp.index_select(tables, 1, where // self.block_size)
        lengths = batch.seq_lens_dev.to(xp.int64)
        own = xp.index_select(lengths, 0, row) - nth_last
        return _Metadata(
            num_tokens=batch.num_tokens,
            slots=block * self.block_size + where % self.block_size,
            rows=row,
            hidden=where.unsqueeze(0) > own.unsqueeze(1),
            foreign=where.unsqueeze(0) >= lengths.unsqueeze(1),
        )


class OnCapturingDevice:
    """Plugins as resolved, with these two drivers in place of the device's and the reference's of
    attention."""

    def __init__(self, resolved: ResolvedPlugins) -> None:
        self._resolved = resolved

    def load(self, kind: str, name: str = "") -> Any:
        """The driver class."""
        if kind == "device":
            return CapturingDevice
        is_reference = kind == "attention" and self._resolved.chosen.get(kind) == "reference"
        return RecordableAttention if is_reference else self._resolved.load(kind, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)


class WithPrompts(OnCapturingDevice):
    """Plugins as resolved, but on that device and with that driver."""

    def load(self, kind: str, name: str = "") -> Any:
        return RecordablePrompts if kind == "attention" else super().load(kind, name)
