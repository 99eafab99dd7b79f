"""Attention driver `indexed`: latent attention to the keys that an indexer likes best, in plain
tensor code on any device (DeepSeek V3.2, arXiv 2512.02556)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fastdeploy_core.errors import CapabilityError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

_MOST_QUERIES = 128  # that are computed at once: each has a score for every key and head


class _Rows(NamedTuple):
    """R rows of T tokens each: neighbouring ones of one sequence, or those of a captured step."""

    tokens: slice  # of the step, R * T
    slots: Tensor  # [R, L] int64: of keys that one of the row's tokens sees
    seen: Tensor  # [R, T, L] bool
    is_somebody: Tensor | None = None  # [R, 1, 1] bool; None: all are


class IndexedAttention:
    """The cache has a latent row and an index key of each token. Steps as they come: rows one after
    the other; captured ones: all at once, over whole block tables.

    Of a query's keys those count whose sum over index heads of weight * relu(query . key) is among
    the index.top_k largest; of equal ones, the earlier.
    """

    name = "indexed"
    contract = (1, 5)
    unit: Literal["core"] = "core"
    # Whole tables cost more than capturing saves where sequences may be longer.
    max_recorded_len = 4096
    can_capture_mixed = False
    features = frozenset({"index", "offsets"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        if spec.index is None:
            raise CapabilityError("attention driver 'indexed' serves layers with an indexer alone")
        self.spec, self.block_size, self._index = spec, block_size, spec.index
        self._device, self._xp, self._write = device, device.xp, kernels["kv_write"]
        self.can_capture_decode = device.limits.graph_capture

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Latent rows, and index keys."""
        block = (num_blocks, self.block_size, 1)
        return ((*block, self.spec.head_dim), (*block, self._index.dim))

    def prepare(self, batch: AttentionBatch) -> tuple[AttentionBatch, list[_Rows]]:
        """Where each row's keys lie."""
        if batch.is_padded or not batch.is_exact:
            return batch, [self._fixed(batch)]
        rows, size, put = [], self.block_size, self._device.to_device
        for number, end in enumerate(batch.seq_lens.tolist()):
            first, last = (int(n) for n in batch.cu_seqlens_q[number : number + 2])
            for begin in range(first, last, _MOST_QUERIES):
                stop = min(begin + _MOST_QUERIES, last)
                keys = np.arange(end - (last - stop))
                blocks = batch.block_tables[number, keys // size].astype(np.int64)
                queries = np.arange(stop - begin) + keys.size - (stop - begin)
                slots, seen = blocks * size + keys % size, keys[None, :] <= queries[:, None]
                rows.append(_Rows(slice(begin, stop), put(slots[None]), put(seen[None])))
        return batch, rows

    def _fixed(self, batch: AttentionBatch) -> _Rows:
        """All rows, by the device's numbers alone. After a row's last written key stands that key
        again, and no token sees it there."""
        xp, rows, width = self._xp, batch.num_seqs, batch.tokens_per_row
        if not width:
            raise CapabilityError(
                "attention driver 'indexed' takes steps as they come and those whose rows feed as "
                "many tokens each, and rows of this one differ; possible: an attention driver of "
                "the device"
            )
        device, num_keys = self._device.device, batch.block_tables.shape[1] * self.block_size
        place = xp.arange(num_keys, dtype=xp.int64, device=device).reshape([1, num_keys])
        nth = xp.arange(width, dtype=xp.int64, device=device).reshape([1, width])
        starts = batch.seq_lens_dev.to(xp.int64).reshape([rows, 1]) - width
        stored = (batch.slot_mapping >= 0).to(xp.int64).reshape([rows, width])
        last = xp.clamp(starts + stored.sum(dim=1, keepdim=True) - 1, 0, None)
        where = xp.minimum(place.expand([rows, num_keys]), last)
        blocks = xp.gather(batch.block_tables_dev.to(xp.int64), 1, where // self.block_size)
        return _Rows(
            tokens=slice(0, rows * width),
            slots=blocks * self.block_size + where % self.block_size,
            seen=place.unsqueeze(1) <= (starts + nth).unsqueeze(2),
            is_somebody=(batch.seq_lens_dev > 0).reshape([rows, 1, 1]),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: tuple[AttentionBatch, list[_Rows]],
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
        for tokens, slots, seen, is_somebody in rows:
            shape, chosen = list(seen.shape[:2]), seen
            if slots.shape[1] > self._index.top_k:
                asked = index_q[tokens].reshape([*shape, *index_q.shape[1:]])
                weighed = weights[tokens].reshape([*shape, -1])
                chosen = self._choose(asked, weighed, _take(xp, keys, slots), seen)
            own = q[tokens].reshape([*shape, *q.shape[1:]])
            y = self._attend(own, _take(xp, latents, slots), chosen)
            if is_somebody is not None:
                y = xp.where(is_somebody, y, xp.zeros_like(y))
            out[tokens] = y.reshape([-1, out.shape[1]]).to(out.dtype)
        return out

    def _choose(self, q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """[R, T, L] bool. q: [R, T, heads, dim]; weights: [R, T, heads] float32; keys: [R, L, dim]
        float32."""
        each = self._products(q, keys)  # [R, T, heads, L]
        xp, top_k = self._xp, self._index.top_k
        scores = (xp.clamp(each, 0.0, None) * weights.unsqueeze(-1)).sum(dim=2)
        scores = xp.where(seen, scores, xp.zeros_like(scores) + float("-inf"))
        worst = xp.topk(scores, top_k, -1)[0][:, :, top_k - 1 :]
        above = scores > worst
        level = ((scores == worst) & seen).to(xp.int64)
        room = top_k - above.to(xp.int64).sum(dim=-1, keepdim=True)
        return above | ((level > 0) & (xp.cumsum(level, 2) <= room))

    def _attend(self, q: Tensor, latents: Tensor, chosen: Tensor) -> Tensor:
        """[R, T, heads * kv_lora_rank] float32. q: [R, T, heads, head_dim]; latents: [R, L,
        head_dim] float32."""
        xp, rank = self._xp, self.spec.kv_lora_rank
        rows, count, heads, _ = q.shape
        logits = self._products(q, latents) * self.spec.scale
        hidden = xp.zeros_like(logits) + float("-inf")
        shares = xp.softmax(xp.where(chosen.unsqueeze(2), logits, hidden), -1)
        y = xp.matmul(shares.reshape([rows, count * heads, -1]), latents[:, :, :rank])
        return y.reshape([rows, count, heads * rank])

    def _products(self, q: Tensor, keys: Tensor) -> Tensor:
        """[R, T, heads, L] float32 of [R, T, heads, dim] and [R, L, dim]."""
        rows, count, heads, dim = q.shape
        folded = q.float().reshape([rows, count * heads, dim])
        return self._xp.matmul_nt(folded, keys).reshape([rows, count, heads, -1])


def _take(xp: Any, pool: Tensor, slots: Tensor) -> Tensor:
    """[R, L, dim] float32 of the pool's [slots, dim]."""
    return xp.index_select(pool, 0, slots.reshape([-1])).float().reshape([*slots.shape, -1])
