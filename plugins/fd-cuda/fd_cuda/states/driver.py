"""Driver `cuda_states`: layers that keep a state.

A step's rows are of two sorts. Those of up to SHORT tokens (decodes) need nothing from the host, so
that steps of them alone can be captured; longer ones (prompts) are computed in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastdeploy_core.errors import CapabilityError

from fd_cuda.kernels.common import cdiv, pad2
from fd_cuda.kernels.common import options as launch_options

from .convolution import convolve
from .recurrence import (
    CHUNK,
    scan_chunks,
    step_states,
    sum_decays,
    within_chunks,
)

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, StateSpec, StateWeights
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

SHORT = 8
_CHANNELS, _TOKENS = 128, 16


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel that holds a state is cut."""

    size: int  # numbers of a state that a program has in its registers
    num_warps: int
    num_stages: int = 1

    def values(self, key_pad: int, value_pad: int) -> int:
        """Values of a program."""
        return min(value_pad, max(16, self.size // key_pad))


STEP = Launch(4096, 4)
_DELTAS = ("delta", "channel_delta")
# By kind; float32. With eight warps Triton 3.6 compiles "space" to accesses beyond shared memory.
SCAN = {"space": Launch(4096, 4, 2)} | dict.fromkeys(_DELTAS, Launch(4096, 4, 3))
SCAN_FLOAT32 = {"space": Launch(2048, 4)} | dict.fromkeys(_DELTAS, Launch(2048, 4, 2))
_SPARE = 8 * 1024  # bytes of shared memory besides what is loaded ahead
# Four programs of four warps a multiprocessor are worth what few registers cost.
WITHIN = {"num_warps": 4, "maxnreg": 168}
WITHIN_BY_CHANNEL = {"num_warps": 8}
_PART = 16  # tokens of a chunk among which products of "channel_delta" are taken column by column


@dataclass(slots=True)
class _Metadata:
    batch: AttentionBatch
    short: int  # tokens of the longest short row; 0: there is none
    long_rows: Tensor | None
    chunks: Tensor | None  # [chunks, 2]: row, number in the row


class CudaStates:
    """One instance per distinct spec; see StateBackend."""

    name = "cuda_states"
    contract = (1, 5)
    can_capture_decode = True
    can_capture_mixed = False
    features = frozenset({"delta", "channel_delta", "space", "short_conv", "kept"})

    def __init__(
        self, spec: StateSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._device = spec, block_size, device
        self._kept, self._short = max(1, spec.kept), max(SHORT, spec.kept)
        self._has_state, self._is_delta = spec.kind != "short_conv", spec.kind in _DELTAS
        self._by_channel = spec.kind == "channel_delta"
        scans = SCAN_FLOAT32 if spec.dtype == "float32" else SCAN
        self.step, self.scan = STEP, scans.get(spec.kind, STEP)
        self._key_pad, self._value_pad = max(16, pad2(spec.key_dim)), max(16, pad2(spec.value_dim))
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        parts = {"Q_AT": 0, "K_AT": keys, "V_AT": 2 * keys}
        if not self._is_delta:
            parts = {"Q_AT": values + keys, "K_AT": values, "V_AT": 0}
        self._shape: dict[str, Any] = {
            "HEADS": spec.num_heads,
            "EACH": spec.num_heads // max(1, spec.num_key_heads),
            "KEY": spec.key_dim,
            "VALUE": spec.value_dim,
            "KEY_PAD": self._key_pad,
            **parts,
        }
        self._kind = {"DELTA": self._is_delta, "CHANNELS": self._by_channel}
        self.scan = replace(self.scan, num_stages=self._stages(device.device))

    def _stages(self, device: Any) -> int:
        """Chunks that scan_chunks loads ahead: as many as fit."""
        shared, least = 99 * 1024, 1
        if torch.device(device).type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            shared = properties.shared_memory_per_block_optin
            # With one, Triton 3.6 compiles 16-bit products for Hopper to wrong results (relative
            # errors of 0.9, bfloat16, measured). Two fit there for all states that are served.
            least = 2 if properties.major == 9 and self.spec.dtype != "float32" else 1
        size = 4 if self.spec.dtype == "float32" else 2
        loaded = (2 + self._is_delta) * self._key_pad
        loaded += self.scan.values(self._key_pad, self._value_pad) + CHUNK
        row = size * loaded + 4 * self._key_pad * self._by_channel
        return max(least, min(self.scan.num_stages, (shared - _SPARE) // (CHUNK * row)))

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """The state, [num_blocks, num_heads, key_dim, value_dim], and the convolution's last
        inputs, [num_blocks, conv_width - 1, channels]. With drafts [num_blocks, spec.kept, ...]:
        that after the first n tokens is at n % kept."""
        spec = self.spec
        block = (num_blocks, spec.kept) if spec.kept else (num_blocks,)
        conv = (*block, spec.conv_width - 1, sum(spec.conv_parts))
        if not self._has_state:
            return (conv,)
        return (*block, spec.num_heads, spec.key_dim, spec.value_dim), conv

    def prepare(self, batch: AttentionBatch) -> _Metadata:
        """Which rows are computed in chunks: one small copy, for prompts alone."""
        width = batch.tokens_per_row
        if batch.is_padded or (not batch.is_exact and not 0 < width <= self._kept):
            raise CapabilityError(
                f"state driver {self.name!r} takes steps as they come, and captured ones of up to "
                f"{self._kept} tokens per row; this one is "
                f"{'padded' if batch.is_padded else 'captured'} with {width or 'any number of'} "
                "tokens per row; possible: no captured steps with prompts"
            )
        if width == 1 or not batch.is_exact:
            return _Metadata(batch, width, None, None)
        fed = np.diff(batch.cu_seqlens_q)
        short = int(fed[fed <= self._short].max(initial=0))
        rows = np.flatnonzero(fed > self._short)
        if not rows.size:
            return _Metadata(batch, short, None, None)
        ends = batch.seq_lens[rows].astype(np.int64)
        counts = (ends - 1) // CHUNK - (ends - fed[rows]) // CHUNK + 1
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        pairs = np.stack((np.repeat(rows, counts), numbers), 1).astype(np.int32)
        both = self._device.to_device(np.concatenate((rows.astype(np.int32), pairs.ravel())))
        return _Metadata(batch, short, both[: rows.size], both[rows.size :].view(-1, 2))

    def forward(
        self,
        x: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        weights: StateWeights,
        cache: tuple[Tensor, ...],
        metadata: _Metadata,
    ) -> Tensor:
        """As StateBackend.forward says."""
        batch, spec = metadata.batch, self.spec
        convolved = x.new_empty(x.shape)
        out = convolved
        if self._has_state:
            out = x.new_empty((x.shape[0], spec.num_heads * spec.value_dim))
        if x.shape[0] > batch.cu_seqlens_q[-1]:
            out.zero_()
        if metadata.short:
            self._convolve(x, weights, convolved, cache[-1], metadata, None)
            if self._has_state:
                self._step(convolved, dt, beta, weights, cache[0], metadata, out)
        if metadata.chunks is not None:
            self._convolve(x, weights, convolved, cache[-1], metadata, metadata.chunks)
            if self._has_state:
                self._scan(convolved, dt, beta, weights, cache[0], metadata, out)
        return out

    def _convolve(
        self,
        x: Tensor,
        weights: StateWeights,
        out: Tensor,
        kept: Tensor,
        metadata: _Metadata,
        chunks: Tensor | None,
    ) -> None:
        """Short rows, or chunks of long ones."""
        batch, spec = metadata.batch, self.spec
        channels, units, block = x.shape[1], 0, _CHANNELS
        num_blocks = cdiv(channels, block)
        if self._is_delta:
            units, block = 2 * spec.num_key_heads, self._key_pad
            num_blocks = units + cdiv(channels - units * spec.key_dim, block)
        num_items = batch.num_seqs if chunks is None else chunks.shape[0]
        tokens = pad2(metadata.short) if chunks is None else _TOKENS
        parts = 1 if chunks is None else CHUNK // _TOKENS
        convolve[(num_items, num_blocks, parts)](
            *(x, weights.conv, weights.conv_bias, out, kept),
            *(batch.cu_seqlens_q_dev, batch.seq_lens_dev, batch.block_tables_dev),
            *(batch.slot_mapping, chunks),
            *(x.stride(0), batch.block_tables_dev.stride(0)),
            CHANNELS=channels,
            WIDTH=spec.conv_width,
            WIDTH_PAD=pad2(spec.conv_width),
            UNIT_HEADS=units,
            HEAD=spec.key_dim,
            SCALE=max(1, spec.key_dim) ** -0.5,
            SILU=self._has_state,
            BIAS=weights.conv_bias is not None,
            BLOCK_SIZE=self._block_size,
            KEPT=self._kept,
            CHUNK=0 if chunks is None else CHUNK,
            TOKENS=tokens,
            BLOCK=block,
            # A warp reads several channels of one token at a time.
            **launch_options(num_warps=min(4, tokens)),
        )

    def _step(
        self,
        x: Tensor,
        dt: Any,
        beta: Any,
        weights: StateWeights,
        state: Tensor,
        metadata: _Metadata,
        out: Tensor,
    ) -> None:
        """Short rows."""
        batch, spec = metadata.batch, self.spec
        values = self.step.values(self._key_pad, self._value_pad)
        step_states[(cdiv(spec.value_dim, values), spec.num_heads, batch.num_seqs)](
            *(x, dt, beta, weights.decay, weights.dt_bias, weights.skip, out, state),
            *(batch.cu_seqlens_q_dev, batch.seq_lens_dev, batch.block_tables_dev),
            *(batch.slot_mapping, x.stride(0), dt.stride(0)),
            0 if beta is None else beta.stride(0),
            batch.block_tables_dev.stride(0),
            **self._shape,
            **self._kind,
            BLOCK_SIZE=self._block_size,
            KEPT=self._kept,
            MOST=self._short,
            VALUES=values,
            **launch_options(num_warps=self.step.num_warps),
        )

    def _scan(
        self,
        x: Tensor,
        dt: Any,
        beta: Any,
        weights: StateWeights,
        state: Tensor,
        metadata: _Metadata,
        out: Tensor,
    ) -> None:
        """Long rows."""
        batch, spec = metadata.batch, self.spec
        rows: Any = metadata.long_rows
        within = self._within(x, dt, beta, weights, metadata)
        values = self.scan.values(self._key_pad, self._value_pad)
        scan_chunks[(cdiv(spec.value_dim, values), spec.num_heads, rows.shape[0])](
            *(x, dt, weights.decay, weights.dt_bias, weights.skip, *within, out, state),
            *(batch.cu_seqlens_q_dev, batch.seq_lens_dev, batch.block_tables_dev, rows),
            *(x.stride(0), dt.stride(0), batch.block_tables_dev.stride(0)),
            **self._shape,
            **self._kind,
            BLOCK_SIZE=self._block_size,
            KEPT=self._kept,
            CHUNK=CHUNK,
            VALUES=values,
            **launch_options(num_warps=self.scan.num_warps, num_stages=self.scan.num_stages),
        )

    def _within(
        self, x: Tensor, dt: Any, beta: Any, weights: StateWeights, metadata: _Metadata
    ) -> tuple[Tensor | None, ...]:
        """What chunks of long rows need of themselves: `inner`, `wanted`, `read` and `sums` of
        recurrence.py, each None where the kind has none."""
        batch, spec = metadata.batch, self.spec
        chunks: Any = metadata.chunks
        of_rows = (batch.cu_seqlens_q_dev, batch.seq_lens_dev, chunks)
        tokens, heads = x.shape[0], spec.num_heads
        inner, wanted, read = x.new_empty((tokens, heads, CHUNK)), None, None
        if self._is_delta:
            wanted = x.new_empty((tokens, heads, spec.value_dim))
            read = x.new_empty((tokens, heads, spec.key_dim))
        grid, gates = (chunks.shape[0], heads), (weights.decay, weights.dt_bias)
        sums, how = None, launch_options(**(WITHIN_BY_CHANNEL if self._by_channel else WITHIN))
        if self._by_channel:
            sums = x.new_empty((tokens, heads, spec.key_dim), dtype=torch.float32)
            sum_decays[grid](
                *(dt, *gates, sums, *of_rows, dt.stride(0)),
                HEADS=heads,
                KEY=spec.key_dim,
                CHUNK=CHUNK,
                KEY_PAD=self._key_pad,
                **how,
            )
        within_chunks[grid](
            *(x, dt, beta, *gates, sums, inner, wanted, read, *of_rows),
            *(x.stride(0), dt.stride(0), 0 if beta is None else beta.stride(0)),
            **self._shape,
            **self._kind,
            CHUNK=CHUNK,
            PART=_PART,
            VALUE_PAD=self._value_pad,
            **how,
        )
        return inner, wanted, read, sums
