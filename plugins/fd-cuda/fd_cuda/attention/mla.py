"""Attention driver `cuda_latent`: latent attention (MLA). The core rotates and writes the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from fastdeploy_core.errors import CapabilityError

from fd_cuda.device import CONTRACT
from fd_cuda.kernels.common import cdiv, pad2
from fd_cuda.kernels.common import options as launch_options
from fd_cuda.settings import is_batch_invariant

from .latent import latent_attention
from .plan import ITEM, DecodeShape, decode_items, latent_items, prefill_tiles, split_parts
from .tuning import Gpu, Sizes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

# Rows of the kernel's matrix (tokens times heads) at most: its accumulator is wide.
_MAX_ROWS = 64
# Rows of a batch that feed at most so many tokens are split by keys, not tiled by tokens.
_SHORT = 8
_LOG2E = math.log2(math.e)


@dataclass(slots=True)
class _Launch:
    """One call of the kernel."""

    shape: DecodeShape
    rows: int  # of the matrix: tokens times heads
    head_block: int  # heads of a program
    items: Tensor
    parts: tuple[Tensor, ...]  # of split rows


@dataclass(slots=True)
class _Metadata:
    batch: AttentionBatch
    launches: list[_Launch]


class LatentAttention:
    """One instance per distinct spec; see AttentionBackend."""

    name = "cuda_latent"
    contract = CONTRACT
    unit: Literal["core", "rope_kv"] = "core"
    can_capture_decode = True
    can_capture_mixed = False

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self.block_size, self._device = spec, block_size, device
        self._exact = spec.dtype == "float32"
        self._itemsize = 4 if self._exact else 2
        self._invariant = is_batch_invariant()
        # Rows must not notice that others of their batch feed more tokens than they do.
        self._short = 1 if self._invariant else _SHORT
        self._scale = spec.scale * _LOG2E
        self._pad = max(16, pad2(spec.kv_lora_rank))
        self.use(Sizes(Gpu.of(device.device)))

    def use(self, sizes: Sizes) -> None:
        """Cut work for another GPU than the device's own."""
        self.sizes = sizes

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Latent rows, [num_blocks, block_size, 1, width]."""
        return ((num_blocks, self.block_size, 1, self.spec.head_dim),)

    def prepare(self, batch: AttentionBatch) -> _Metadata:
        """Cut the step's work: one small kernel for decodes, one small copy for prompts."""
        if batch.num_tokens == 0 or batch.num_seqs == 0:
            return _Metadata(batch, [])
        if 0 < batch.tokens_per_row <= _MAX_ROWS:
            return _Metadata(batch, [self._decodes(batch, batch.tokens_per_row)])
        if not batch.is_exact:
            raise CapabilityError(
                f"attention driver {self.name!r} cannot capture {batch.tokens_per_row} tokens per "
                f"row; at most {_MAX_ROWS}: use fewer speculative tokens"
            )
        fed = np.diff(batch.cu_seqlens_q)
        short = fed[(fed > 0) & (fed <= self._short)]
        launches = [self._decodes(batch, int(short.max()))] if short.size else []
        if fed.max() > self._short:
            launches.append(self._tiles(batch))
        return _Metadata(batch, launches)

    def _decodes(self, batch: AttentionBatch, max_tokens: int) -> _Launch:
        head_block = self._head_block(max_tokens)
        columns = cdiv(self.spec.num_heads, head_block)
        rows = head_block * pad2(max_tokens)
        shape = self.sizes.latent(columns, self._itemsize)
        items, counters = decode_items(
            batch.seq_lens_dev,
            batch.cu_seqlens_q_dev,
            batch.num_seqs,
            batch.num_seqs * columns,
            max_tokens,
            shape,
            invariant=self._invariant,
            new_in_cache=True,
        )
        parts = split_parts(items, columns * rows, self._pad)
        return _Launch(shape, rows, head_block, items, (*parts, counters))

    def _tiles(self, batch: AttentionBatch) -> _Launch:
        head_block = self._head_block(_SHORT)
        tokens = _MAX_ROWS // head_block
        shape = self.sizes.latent(1, self._itemsize)
        tiles = prefill_tiles(batch.cu_seqlens_q, batch.seq_lens, self._short, tokens)
        host = latent_items(tiles, batch.cu_seqlens_q, batch.seq_lens, tokens, shape.tile)
        items = self._device.to_device(host)
        return _Launch(shape, _MAX_ROWS, head_block, items, (items,) * 4)  # no row is split

    def _head_block(self, tokens: int) -> int:
        """Heads that share a program, given how many tokens do."""
        most = max(1, _MAX_ROWS // pad2(tokens))
        return min(pad2(self.spec.num_heads), most)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: _Metadata,
        rotary: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * kv_lora_rank]; k and v are read from the cache."""
        batch, spec = metadata.batch, self.spec
        out = q.new_empty((q.shape[0], spec.num_heads * spec.kv_lora_rank))
        if q.shape[0] > batch.cu_seqlens_q[-1]:  # tokens of no row: nobody reads theirs
            out.zero_()
        rope = spec.head_dim - spec.kv_lora_rank
        for launch in metadata.launches:
            columns = cdiv(spec.num_heads, launch.head_block)
            latent_attention[(launch.items.shape[0], columns)](
                q,
                out,
                cache[0],
                launch.items,
                batch.block_tables_dev,
                *launch.parts,
                self._scale,
                stride_q=q.stride(0),
                stride_q_head=q.stride(1),
                stride_table=batch.block_tables_dev.stride(0),
                num_head_blocks=columns,
                HEADS=spec.num_heads,
                HEAD_BLOCK=launch.head_block,
                RANK=spec.kv_lora_rank,
                RANK_PAD=self._pad,
                ROPE=rope,
                ROPE_PAD=max(16, pad2(rope)),
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
