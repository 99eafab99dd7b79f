"""Attention over the paged cache, row by row in plain tensor code. Right, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    Row = tuple[slice, Tensor, Tensor]  # its tokens, its slots of the cache, what each token may see


class MyFlashAttention:
    """Unit "core": the core has rotated q and k and written the cache before."""

    name = "myflash"
    contract = (1, 0)
    unit: Literal["core", "rope_kv", "projections"] = "core"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec, self._block_size, self._device, self._xp = spec, block_size, device, device.xp

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Keys, values."""
        first = (num_blocks, self._block_size, self.spec.num_kv_heads)
        return (*first, self.spec.head_dim), (*first, self.spec.v_head_dim)

    def prepare(self, batch: AttentionBatch) -> list[Row]:
        """Once a step, for all layers of this spec."""
        rows: list[Row] = []
        for row, length in enumerate(batch.seq_lens.tolist()):
            start, end = (int(n) for n in batch.cu_seqlens_q[row : row + 2])
            if start == end:
                continue
            seen = np.arange(length)
            blocks = batch.block_tables[row][seen // self._block_size].astype(np.int64)
            slots = blocks * self._block_size + seen % self._block_size
            visible = seen <= np.arange(length - (end - start), length)[:, None]
            put = self._device.to_device
            rows.append((slice(start, end), put(slots), put(visible)))
        return rows

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: list[Row],
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * v_head_dim]."""
        spec, xp = self.spec, self._xp
        shape = [q.shape[0], spec.num_heads * spec.v_head_dim]
        out: Tensor = xp.zeros(shape, dtype=q.dtype, device=q.device)
        for tokens, slots, visible in metadata:
            keys, values = (self._heads(pool, slots) for pool in cache)  # [heads, length, dim]
            own = q[tokens].float().transpose(0, 1)
            scores = xp.matmul(own, keys.transpose(1, 2)) * spec.scale
            hidden = xp.full(list(scores.shape), float("-inf"), dtype=xp.float32, device=q.device)
            weights = xp.softmax(xp.where(visible.unsqueeze(0), scores, hidden), -1)
            result = xp.matmul(weights, values).transpose(0, 1).reshape([-1, shape[1]])
            out[tokens] = result.to(q.dtype)
        return out

    def _heads(self, pool: Tensor, slots: Tensor) -> Tensor:
        """What a row has in the cache, once for each query head."""
        flat = pool.reshape([-1, *pool.shape[2:]])
        found = self._xp.index_select(flat, 0, slots).float()
        group = self.spec.num_heads // self.spec.num_kv_heads
        return self._xp.repeat_interleave(found, group, 1).transpose(0, 1)
