"""Attention driver `metax_flash`: rotation and cache write in place on the joined heads, then flash
attention over block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from fd_accelerator.vendor_operators import WholeHeads

from .operators import OPERATORS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Metadata:
    """One step; int32 on the device."""

    batch: AttentionBatch
    before: Tensor  # [B, 1] tokens in the cache before this step
    row_of_token: Tensor  # [T]
    kv_offsets: Tensor  # [B + 1] where each row's keys would start if they were joined
    longest_query: int
    longest: int


class MetaxAttention:
    """Cache [blocks, block_size, kv_heads, head_dim]."""

    name = "metax_flash"
    contract = (1, 0)
    unit: Literal["core", "rope_kv"] = "rope_kv"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._device, self._xp = spec, block_size, device, device.xp
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._whole_heads = WholeHeads(spec, kernels)

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys and values alike."""
        shape = (num_blocks, self._block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return shape, shape

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Lengths in the forms that the three operators want."""
        put = self._device.to_device
        counts = np.diff(batch.cu_seqlens_q)
        before = (batch.seq_lens - counts).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(batch.seq_lens))).astype(np.int32)
        return Metadata(
            batch=batch,
            before=put(before[:, None].copy()),
            row_of_token=put(np.repeat(np.arange(len(counts), dtype=np.int32), counts)),
            kv_offsets=put(offsets),
            longest_query=int(counts.max(initial=0)),
            longest=int(batch.seq_lens.max(initial=0)),
        )

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
        """[num_tokens, num_heads * head_dim]. No cache with scales is accepted, so none are
        given."""
        spec, batch, xp = self.spec, metadata.batch, self._xp
        tokens, heads = q.shape[0], spec.num_heads
        out = xp.zeros([tokens, heads, spec.head_dim], dtype=q.dtype, device=q.device)
        if tokens == 0:
            return out.reshape([0, heads * spec.head_dim])
        q, k, rotary = self._whole_heads(q, k, batch.positions, rotary)
        joined = xp.cat((q, k, v), 1).reshape([tokens, -1])  # a copy: the operators write into it
        where = (metadata.before, metadata.row_of_token, batch.cu_seqlens_q_dev)
        shape = (heads, spec.num_kv_heads, spec.head_dim)
        if rotary is not None:
            OPERATORS["rotary_position_embedding"](
                *(joined, None, *where, self._table(rotary), *shape, rotary.shape[0]),
                *(not spec.rotary_interleaved, False),
            )
        OPERATORS["write_cache_kv"](
            *(joined, None, *where, batch.block_tables_dev, *cache, *shape, metadata.longest)
        )
        turned = joined.reshape([tokens, heads + 2 * spec.num_kv_heads, spec.head_dim])
        OPERATORS["flash_attn_varlen_forward"](
            q=turned[:, :heads],
            k=cache[0],
            v=cache[1],
            out=out,
            cu_seqlens_q=batch.cu_seqlens_q_dev,
            cu_seqlens_k=metadata.kv_offsets,
            block_tables=batch.block_tables_dev,
            alibi_slopes=None,
            max_seqlen_q=metadata.longest_query,
            max_seqlen_k=metadata.longest,
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
        )
        return out.reshape([tokens, heads * spec.head_dim])

    def _table(self, rotary: Tensor) -> Tensor:
        """[2, 1, positions, 1, head_dim / 2] float32: cosines, then sines."""
        if self._rotary is None or self._rotary[0] is not rotary:
            halves = rotary.reshape([rotary.shape[0], 2, rotary.shape[1] // 2]).transpose(0, 1)
            table = halves.contiguous().reshape([2, 1, rotary.shape[0], 1, rotary.shape[1] // 2])
            self._rotary = (rotary, table)
        return self._rotary[1]
