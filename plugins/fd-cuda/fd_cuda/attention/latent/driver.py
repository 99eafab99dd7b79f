"""Attention driver `cuda_latent`: latent attention (MLA). The core rotates and writes the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fd_cuda.attention.cached import SHORT, CachedAttention, Metadata
from fd_cuda.attention.plan import ITEM, DecodeShape
from fd_cuda.kernels.common import cdiv, pad2
from fd_cuda.kernels.common import options as launch_options

from .kernel import latent_attention

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

# Rows of the kernel's matrix (tokens times heads) at most: its accumulator is wide.
_MAX_ROWS = 64


class LatentAttention(CachedAttention):
    """One instance per distinct spec; see AttentionBackend."""

    name = "cuda_latent"

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(spec, block_size, device, _MAX_ROWS)
        self._pad = max(16, pad2(spec.kv_lora_rank))

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Latent rows, [num_blocks, block_size, 1, width]."""
        return ((num_blocks, self.block_size, 1, self.spec.head_dim),)

    def _short_rows(self, num_seqs: int, max_tokens: int) -> tuple[DecodeShape, int, int, int, int]:
        heads = self._head_block(max_tokens)
        columns = cdiv(self.spec.num_heads, heads)
        shape = self.sizes.latent(columns, self._itemsize)
        return shape, heads * pad2(max_tokens), heads, columns, self._pad

    def _long_rows(self) -> tuple[DecodeShape, int, int, int, int]:
        heads = self._head_block(SHORT)
        columns = cdiv(self.spec.num_heads, heads)
        return self.sizes.latent(1, self._itemsize), _MAX_ROWS, heads, columns, _MAX_ROWS // heads

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
        metadata: Metadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * kv_lora_rank]; k and v are read from the cache."""
        batch, spec = metadata.batch, self.spec
        out = self._out(q, batch, spec.num_heads * spec.kv_lora_rank)
        tables = batch.block_tables_dev
        self._attend(q, out, cache[0], metadata.launches, tables, self.block_size)
        return out

    def _attend(
        self,
        q: Tensor,
        out: Tensor,
        latents: Tensor,
        launches: list[Any],
        tables: Tensor,
        block_size: int,
    ) -> None:
        """Into `out`, to the latent rows that `tables` says."""
        spec = self.spec
        rope = spec.head_dim - spec.kv_lora_rank
        for launch in launches:
            latent_attention[(launch.items.shape[0], launch.columns)](
                q,
                out,
                latents,
                launch.items,
                tables,
                *launch.parts,
                self._scale,
                stride_q=q.stride(0),
                stride_q_head=q.stride(1),
                stride_table=tables.stride(0),
                HEADS=spec.num_heads,
                HEAD_BLOCK=launch.heads,
                RANK=spec.kv_lora_rank,
                RANK_PAD=self._pad,
                ROPE=rope,
                ROPE_PAD=max(16, pad2(rope)),
                BLOCK_SIZE=block_size,
                M=max(16, launch.rows),
                ROWS=launch.rows,
                TILE=launch.shape.tile,
                STAGES=launch.shape.num_stages,
                EXACT=self._exact,
                ITEM=ITEM,
                num_warps=launch.shape.num_warps,
                **launch_options(),
            )
