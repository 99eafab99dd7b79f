"""Attention driver `cuda_quantized`: grouped-query attention over an int8, fp8 or int4 cache.

The core rotates and writes the cache (kernels/quant_cache.py); numbers stay packed until a tile of
them is in the multiprocessor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import triton
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.errors import CapabilityError

from fd_cuda.device import CONTRACT
from fd_cuda.kernels.common import options as launch_options
from fd_cuda.settings import is_batch_invariant

from .plan import ITEM, DecodeShape, decode_items, latent_items, prefill_tiles, split_parts
from .quantized_kernel import quantized_attention
from .question import MAX_ROWS
from .tuning import Gpu, Sizes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

# Rows of a batch that feed at most so many tokens are split by keys, not tiled by tokens.
_SHORT = 8
_LOG2E = math.log2(math.e)
_PROMPT_KEYS = 64  # keys per tile of prompts
_PROMPT_ROWS = 64  # tokens times heads of a group


@dataclass(slots=True)
class _Launch:
    """One call of the kernel."""

    shape: DecodeShape
    rows: int  # of the matrix
    items: Tensor
    parts: tuple[Tensor, ...]  # of split rows


@dataclass(slots=True)
class _Metadata:
    batch: AttentionBatch
    launches: list[_Launch]


class QuantizedAttention:
    """One instance per distinct spec; see AttentionBackend."""

    name = "cuda_quantized"
    contract = CONTRACT
    unit: Literal["core", "rope_kv"] = "core"
    can_capture_decode = True
    can_capture_mixed = False

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self.block_size, self._device = spec, block_size, device
        self._kind = KV_FORMATS[spec.kv_format]
        self._group = spec.num_heads // spec.num_kv_heads
        self._exact = spec.dtype == "float32"
        self._invariant = is_batch_invariant()
        # Rows must not notice that others of their batch feed more tokens than they do.
        self._short = 1 if self._invariant else _SHORT
        self._scale = spec.scale * _LOG2E
        self._pad = max(16, triton.next_power_of_2(spec.head_dim))
        self._v_pad = max(16, triton.next_power_of_2(spec.v_head_dim))
        self._most_tokens = MAX_ROWS // self._group
        self.sizes = Sizes(Gpu.of(device.device))

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of keys and values, and dynamic scales of both behind them."""
        spec, kind = self.spec, self._kind
        lead = (num_blocks, self.block_size, spec.num_kv_heads)
        numbers = tuple((*lead, kind.width(dim)) for dim in (spec.head_dim, spec.v_head_dim))
        return numbers if spec.kv_static else (*numbers, *[(*lead, kind.scale_width)] * 2)

    def prepare(self, batch: AttentionBatch) -> _Metadata:
        """Cut the step's work: one small kernel for decodes, one small copy for prompts."""
        if batch.num_tokens == 0 or batch.num_seqs == 0:
            return _Metadata(batch, [])
        if 0 < batch.tokens_per_row <= self._most_tokens:
            return _Metadata(batch, [self._decodes(batch, batch.tokens_per_row)])
        if not batch.is_exact:
            raise CapabilityError(
                f"attention driver {self.name!r} cannot capture {batch.tokens_per_row} tokens per row "
                f"of {self._group} query heads per kv head; at most {self._most_tokens}: use fewer "
                "speculative tokens"
            )
        fed = np.diff(batch.cu_seqlens_q)
        most = min(self._short, self._most_tokens)
        short = fed[(fed > 0) & (fed <= most)]
        launches = [self._decodes(batch, int(short.max()))] if short.size else []
        if fed.max() > most:
            launches.append(self._tiles(batch, most))
        return _Metadata(batch, launches)

    def _decodes(self, batch: AttentionBatch, max_tokens: int) -> _Launch:
        heads = self.spec.num_kv_heads
        rows = triton.next_power_of_2(max_tokens * self._group)
        itemsize = 4 if self._exact else 2
        shape = self.sizes.decode(batch.num_seqs, heads, rows, self._pad, itemsize)
        items, counters = decode_items(
            batch.seq_lens_dev,
            batch.cu_seqlens_q_dev,
            batch.num_seqs,
            batch.num_seqs * heads,
            max_tokens,
            shape,
            invariant=self._invariant,
            new_in_cache=True,
        )
        parts = split_parts(items, heads * rows, self._v_pad)
        return _Launch(shape, rows, items, (*parts, counters))

    def _tiles(self, batch: AttentionBatch, shortest: int) -> _Launch:
        tokens = max(1, _PROMPT_ROWS // self._group)
        keys = 32 if self._exact else _PROMPT_KEYS
        shape = DecodeShape(keys, 1, 1, 1, 4, 1 if self._exact else 2)
        tiles = prefill_tiles(batch.cu_seqlens_q, batch.seq_lens, shortest, tokens)
        host = latent_items(tiles, batch.cu_seqlens_q, batch.seq_lens, tokens, keys)
        items = self._device.to_device(host)
        rows = triton.next_power_of_2(tokens * self._group)
        return _Launch(shape, rows, items, (items,) * 4)  # no row is split

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: _Metadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim]; k and v are read from the cache."""
        batch, spec = metadata.batch, self.spec
        out = q.new_empty((q.shape[0], spec.num_heads * spec.v_head_dim))
        if q.shape[0] > batch.cu_seqlens_q[-1]:  # tokens of no row: nobody reads theirs
            out.zero_()
        if scales is None:
            tables = (cache[2], cache[3], cache[3])
        else:
            lows = scales.minimum or scales.scale
            tables = (scales.scale[0], scales.scale[1], lows[1])
        for launch in metadata.launches:
            quantized_attention[(launch.items.shape[0], spec.num_kv_heads)](
                q,
                out,
                cache[0],
                cache[1],
                *tables,
                launch.items,
                batch.block_tables_dev,
                *launch.parts,
                self._scale,
                stride_q=q.stride(0),
                stride_q_head=q.stride(1),
                stride_table=batch.block_tables_dev.stride(0),
                num_kv_heads=spec.num_kv_heads,
                GROUP=self._group,
                WIDTH=spec.head_dim,
                V_WIDTH=spec.v_head_dim,
                WIDTH_PAD=self._pad,
                V_WIDTH_PAD=self._v_pad,
                PER_BYTE=self._kind.per_byte,
                IS_STATIC=scales is not None,
                HAS_LOW=self._kind.has_minimum,
                BLOCK_SIZE=self.block_size,
                M=max(16, launch.rows),
                ROWS=launch.rows,
                TILE=launch.shape.tile,
                STAGES=launch.shape.num_stages,
                EXACT=self._exact,
                ITEM=ITEM,
                num_warps=launch.shape.num_warps,
                **launch_options(),
            )
        return out
