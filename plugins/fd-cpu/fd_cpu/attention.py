"""Paged attention over this device's own cache layout; rotation and cache write included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts import CONTRACT

from .team import address, team

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class X86Attention:
    """Keys [block, kv head, head_dim, block_size]: sixteen tokens a register; values [block, kv head,
    block_size, head_dim]: sixteen dimensions of one token."""

    name = "x86"
    contract = CONTRACT
    unit = "rope_kv"
    can_capture_decode = True
    can_capture_mixed = False

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        from . import _native

        self._spec, self._block_size = spec, block_size
        code = 0 if spec.dtype == "float32" else 1
        self._shape = _native.AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            block_size,
            spec.scale,
            spec.rotary_interleaved,
            code,
            code,
        )

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """(keys, values)."""
        spec, size = self._spec, self._block_size
        return (
            (num_blocks, spec.num_kv_heads, spec.head_dim, size),
            (num_blocks, spec.num_kv_heads, size, spec.v_head_dim),
        )

    def prepare(self, batch: AttentionBatch) -> Any:
        """Kernels read the batch's own tensors."""
        return batch

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionBatch,
        rotary: Tensor | None = None,
    ) -> Tensor:
        """Rotate, write, attend."""
        t, spec, batch = team(), self._spec, metadata
        num_tokens = int(q.shape[0])
        y = t.new((num_tokens, spec.num_heads * spec.v_head_dim), q.dtype)
        if num_tokens == 0:
            return y
        tensors = (
            *(q, k, v, rotary, batch.positions, batch.slot_mapping, batch.cu_seqlens_q_dev),
            *(batch.seq_lens_dev, batch.block_tables_dev, *cache, y),
        )
        t.keep(*tensors)
        sizes = (
            *(int(q.stride()[0]), int(k.stride()[0]), int(v.stride()[0])),
            *(num_tokens, batch.num_seqs, int(batch.block_tables_dev.shape[1])),
            0 if rotary is None else int(rotary.shape[1]),
        )
        t.native.attention(self._shape, [address(x) for x in tensors], sizes)
        return y
