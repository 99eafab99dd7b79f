"""Attention driver `indexed`: latent attention to the keys that an indexer likes best, in plain
tensor code on any device (DeepSeek V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fastdeploy_core.errors import CapabilityError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

_MOST_QUERIES = 128  # that are computed at once: each has a score for every key and head


class _Row(NamedTuple):
    """Some neighbouring tokens of one sequence."""

    tokens: slice  # of the step
    slots: Tensor  # [L] int64: of the keys that the last of them sees
    seen: Tensor  # [tokens, L] bool


class IndexedAttention:
    """Rows one after the other. The cache has a latent row and an index key of each token.

    Of a query's keys those count whose sum over index heads of weight * relu(query . key) is among
    the index.top_k largest; of equal ones, the earlier.
    """

    name = "indexed"
    contract = (1, 5)
    unit: Literal["core"] = "core"
    can_capture_decode = False
    can_capture_mixed = False
    features = frozenset({"index", "offsets"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        if spec.index is None:
            raise CapabilityError("attention driver 'indexed' serves layers with an indexer alone")
        self.spec, self.block_size, self._index = spec, block_size, spec.index
        self._device, self._xp, self._write = device, device.xp, kernels["kv_write"]

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Latent rows, and index keys."""
        block = (num_blocks, self.block_size, 1)
        return ((*block, self.spec.head_dim), (*block, self._index.dim))

    def prepare(self, batch: AttentionBatch) -> tuple[AttentionBatch, list[_Row]]:
        """Where each row's keys lie."""
        if batch.is_padded or not batch.is_exact:
            raise CapabilityError(
                "attention driver 'indexed' takes steps as they come, and this one is padded or "
                "captured; possible: an attention driver of the device"
            )
        rows, size, put = [], self.block_size, self._device.to_device
        for number, end in enumerate(batch.seq_lens.tolist()):
            first, last = (int(n) for n in batch.cu_seqlens_q[number : number + 2])
            for begin in range(first, last, _MOST_QUERIES):
                stop = min(begin + _MOST_QUERIES, last)
                keys = np.arange(end - (last - stop))
                blocks = batch.block_tables[number, keys // size].astype(np.int64)
                queries = np.arange(stop - begin) + keys.size - (stop - begin)
                seen = put(keys[None, :] <= queries[:, None])
                rows.append(_Row(slice(begin, stop), put(blocks * size + keys % size), seen))
        return batch, rows

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: tuple[AttentionBatch, list[_Row]],
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        index: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward, with `index`."""
        if index is None:
            raise CapabilityError("attention driver 'indexed' was called without an indexer's part")
        xp, spec, (batch, rows) = self._xp, self.spec, metadata
        index_q, index_k, weights = index
        # Not two widths in one call: a device's kernel may have one for both.
        for row, pool in ((k, cache[0]), (index_k, cache[1])):
            self._write((row,), (pool,), batch.slot_mapping)
        latents = cache[0].reshape([-1, spec.head_dim])
        keys = cache[1].reshape([-1, cache[1].shape[3]])
        out = xp.zeros(
            [q.shape[0], spec.num_heads * spec.kv_lora_rank], dtype=q.dtype, device=q.device
        )
        for tokens, slots, seen in rows:
            chosen = seen
            if slots.shape[0] > self._index.top_k:
                own = xp.index_select(keys, 0, slots)
                chosen = self._choose(index_q[tokens], weights[tokens], own, seen)
            y = self._attend(q[tokens], xp.index_select(latents, 0, slots), chosen)
            out[tokens] = y.to(out.dtype)
        return out

    def _choose(self, q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """[T, L] bool. q: [T, heads, dim]; weights: [T, heads] float32; keys: [L, dim]."""
        xp = self._xp
        each = xp.matmul(q.float(), keys.float().t().unsqueeze(0))  # [T, heads, L]
        scores = (xp.clamp(each, 0.0, None) * weights.unsqueeze(-1)).sum(dim=1)
        scores = xp.where(seen, scores, xp.zeros_like(scores) + float("-inf"))
        worst = xp.topk(scores, self._index.top_k, -1)[0][:, self._index.top_k - 1 :]
        above = scores > worst
        level = ((scores == worst) & seen).to(xp.int64)
        room = self._index.top_k - above.to(xp.int64).sum(dim=-1, keepdim=True)
        return above | ((level > 0) & (xp.cumsum(level, 1) <= room))

    def _attend(self, q: Tensor, latents: Tensor, chosen: Tensor) -> Tensor:
        """[T, heads * kv_lora_rank] float32. q: [T, heads, head_dim]; latents: [L, head_dim]."""
        xp, wide = self._xp, latents.float()
        logits = xp.matmul(q.float(), wide.t().unsqueeze(0)) * self.spec.scale
        hidden = xp.zeros_like(logits) + float("-inf")
        shares = xp.softmax(xp.where(chosen.unsqueeze(1), logits, hidden), -1)
        y = xp.matmul(shares, wide[:, : self.spec.kv_lora_rank].unsqueeze(0))
        return y.reshape([y.shape[0], -1])
