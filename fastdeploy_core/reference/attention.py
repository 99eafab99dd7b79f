"""Attention driver `reference`: paged attention in plain tensor code, kinds gqa and mla.

prepare() computes row numbers once per step; keys, values and queries are gathered by them in the
order needed, so no layer transposes anything. Rows with few query tokens (decodes, speculation) run
together: over lists of pool rows if the tensor library can attend to lists, else over tiles of
keys. A row reads only its own keys, so its result does not depend on the other rows of the batch,
except for rounding. Longer rows (prefill) run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.kv_formats import kv_format
from fastdeploy_core.reference.ops.kv import QuantizedRows

from . import attention_fixed
from .attention_plan import (
    MAX_CHUNK,
    TILE,
    Chunk,
    Heads,
    ShortGroup,
    plan_longs,
    plan_ragged,
    plan_tiles,
)

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

# A mask up to this size is stored for every head, because adding equal shapes is several times
# faster.
_MAX_FULL_MASK = 1 << 22
# With more query heads per kv head than this, products over tiles read the keys fewer times.
_MAX_RAGGED_GROUP = 8


@dataclass(slots=True)
class _Group:
    """A ShortGroup on the device; its docstring explains the letters of the shapes."""

    num_rows: int
    num_tiles: int
    max_tiles: int
    num_queries: int
    kv_rows: Tensor
    query_rows: Tensor
    spread: Tensor | None
    collect: Tensor | None
    row_of_tile: Tensor
    mask: Tensor  # [R, H, Q, G, W] or broadcastable to it
    output_rows: Tensor | None


@dataclass(slots=True)
class _Chunk:
    query_rows: Tensor
    num_queries: int
    keys: slice  # of the row's, those that a query of the chunk sees
    mask: Tensor  # [num_queries, keys]; None: a single query, which sees all of them


@dataclass(slots=True)
class _Metadata:
    """The result of prepare() for every layer of one spec."""

    num_tokens: int
    ragged: tuple[Any, Tensor | None] | None  # pattern, rows of q and of the output
    groups: list[_Group]
    longs: list[tuple[Tensor, list[_Chunk]]]
    fixed: attention_fixed.FixedStep | None = None  # used instead of all other fields


class ReferenceAttention:
    """One instance per distinct spec."""

    name = "reference"
    contract = CONTRACT
    unit: Literal["core", "rope_kv"] = "core"
    can_capture_decode = False  # set per instance, if the device can capture
    # A captured step reads whole block tables; for longer ones this costs more than capturing
    # saves.
    max_recorded_len = 4096
    can_capture_mixed = False
    # Layers rotate before it, so positions are nothing to it.
    features = frozenset({"offsets", "window", "chunk", "sinks", "softcap"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self._device = device
        shape = (spec.num_heads, spec.num_kv_heads, block_size, spec.window, spec.chunk)
        self._heads = Heads(*shape)
        # For mla the values are the first columns of the keys. The product takes whole rows and
        # drops the rest, which is cheaper than cutting every row.
        self._value_dim = spec.kv_lora_rank if spec.kind == "mla" else spec.v_head_dim
        xp = device.xp
        hidden = np.triu(np.full((MAX_CHUNK, MAX_CHUNK), -np.inf, dtype=np.float32), 1)
        self._triangle = device.to_device(hidden)
        self._uses_lists = (
            xp.has_ragged_attention
            and device.device == "cpu"
            and spec.dtype == "float32"
            and self._heads.group <= _MAX_RAGGED_GROUP
            and not (spec.kv_format or spec.sinks or spec.softcap)
        )
        self.can_capture_decode = device.limits.graph_capture and not self._heads.is_bounded
        self._kv = kv_format(spec.kv_format)
        self._narrow = xp.dtype(spec.dtype) if spec.dtype != "float32" else None

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """gqa: keys and values [num_blocks, block_size, num_kv_heads, dim]; mla: latent rows. If
        the cache is quantized dynamically, their scales follow."""
        spec, kind = self.spec, self._kv
        shape = (num_blocks, self.block_size, spec.num_kv_heads)
        dims = (spec.head_dim,) if spec.kind == "mla" else (spec.head_dim, spec.v_head_dim)
        if kind is None:
            return tuple((*shape, dim) for dim in dims)
        numbers = tuple((*shape, kind.width(dim)) for dim in dims)
        return numbers if spec.kv_static else numbers + ((*shape, kind.scale_width),) * len(dims)

    def prepare(self, batch: AttentionBatch) -> _Metadata:
        """Row numbers and masks of this step, for every layer of this spec."""
        if batch.is_padded or not batch.is_exact:
            fixed = attention_fixed.prepare(self._device.xp, batch, self._heads)
            return _Metadata(batch.num_tokens, None, [], [], fixed)
        to_device = self._device.to_device
        ragged, groups = None, []
        if self._uses_lists:
            ragged = self._plan_lists(batch)
        else:
            groups = [self._upload(group) for group in plan_tiles(batch, self._heads)]
        return _Metadata(
            num_tokens=batch.num_tokens,
            ragged=ragged,
            groups=groups,
            longs=[
                (
                    to_device(long.kv_rows),
                    [self._chunk(chunk) for chunk in long.chunks],
                )
                for long in plan_longs(batch, self._heads)
            ],
        )

    def _plan_lists(self, batch: AttentionBatch) -> tuple[Any, Tensor | None] | None:
        plan = plan_ragged(batch, self._heads)
        if plan is None:
            return None
        pattern = self._device.xp.ragged_pattern(plan.offsets, plan.pool_rows)
        rows = None if plan.output_rows is None else self._device.to_device(plan.output_rows)
        return pattern, rows

    def _chunk(self, chunk: Chunk) -> _Chunk:
        keys = slice(chunk.first_key, chunk.num_keys)
        mask = self._mask(self._device.xp, chunk.num_queries, chunk.num_keys - chunk.first_key)
        if chunk.firsts is not None and mask is not None:
            hidden = np.arange(int(mask.shape[1])) < chunk.firsts[:, None]
            penalty = np.where(hidden, np.float32(-np.inf), np.float32(0))
            mask = mask + self._device.to_device(penalty)
        return _Chunk(self._device.to_device(chunk.query_rows), chunk.num_queries, keys, mask)

    def _upload(self, group: ShortGroup) -> _Group:
        def upload(rows: np.ndarray | None) -> Tensor | None:
            return None if rows is None else self._device.to_device(rows)

        width = group.max_tiles * TILE
        seen = np.arange(width) <= group.limits[:, :, None]
        if group.firsts is not None:
            seen &= np.arange(width) >= group.firsts[:, :, None]
        penalty = np.where(seen, np.float32(0), np.float32(-np.inf))
        mask = self._device.to_device(penalty[:, None, :, None, :])
        heads = self._heads
        shape = [group.num_rows, heads.num_kv_heads, group.num_queries, heads.group, width]
        if int(np.prod(shape)) <= _MAX_FULL_MASK:
            mask = mask.expand(shape).contiguous()
        return _Group(
            num_rows=group.num_rows,
            num_tiles=group.num_tiles,
            max_tiles=group.max_tiles,
            num_queries=group.num_queries,
            kv_rows=upload(group.kv_rows),
            query_rows=upload(group.query_rows),
            spread=upload(group.spread),
            collect=upload(group.collect),
            row_of_tile=upload(group.row_of_tile),
            mask=mask,
            output_rows=upload(group.output_rows),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: _Metadata,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * value_dim]; k and v are read from the cache."""
        xp = self._device.xp
        spec = self.spec
        shape = [metadata.num_tokens * spec.num_heads, self._value_dim]
        whole = [metadata.num_tokens, spec.num_heads * self._value_dim]
        if metadata.num_tokens == 0:
            return xp.zeros(whole, dtype=q.dtype, device=q.device)
        keys = self._pool(cache, 0, spec.head_dim, scales)
        values = keys if spec.kind == "mla" else self._pool(cache, 1, spec.v_head_dim, scales)
        queries = (self._wide(q) * spec.scale).reshape([shape[0], spec.head_dim])
        if metadata.fixed is not None:
            pools = (keys, values)
            out = attention_fixed.attend(
                *(xp, metadata.fixed, self._heads, queries),
                lambda index, rows: self._rows(xp, pools[index], rows),
                self._value_dim,
                lambda scores, mask: self._weights(xp, scores, mask, sinks),
            )
            return out.to(q.dtype)

        if metadata.ragged is not None and metadata.ragged[1] is None:
            return self._lists(xp, metadata.ragged[0], queries, keys, values).reshape(whole)
        groups = metadata.groups
        if len(groups) == 1 and groups[0].output_rows is None:
            only = self._short(xp, groups[0], queries, keys, values, sinks)
            return only.reshape(whole).to(q.dtype)
        out = xp.zeros(shape, dtype=xp.float32, device=q.device)
        if metadata.ragged is not None:
            pattern, own_rows = metadata.ragged
            own = xp.index_select(queries, 0, own_rows)
            xp.index_copy_(out, 0, own_rows, self._lists(xp, pattern, own, keys, values))
        for group in groups:
            rows = self._short(xp, group, queries, keys, values, sinks)
            rows = rows.reshape([-1, self._value_dim])
            xp.index_copy_(out, 0, group.output_rows, rows)
        for kv_rows, chunks in metadata.longs:
            self._long(xp, kv_rows, chunks, queries, keys, values, out, sinks)
        return out.view(whole).to(q.dtype)

    def _pool(
        self, cache: tuple[Tensor, ...], index: int, dim: int, scales: KVScales | None
    ) -> Tensor | QuantizedRows:
        """One row for each (slot, head)."""
        if self._kv is None:
            return cache[index].view([-1, dim])
        heads = self.spec.num_kv_heads
        if scales is None:
            dynamic = cache[len(cache) // 2 + index]
            return QuantizedRows(self._kv, heads, dim, cache[index], dynamic)
        tables = (scales.scale[index], scales.minimum[index] if scales.minimum else None)
        return QuantizedRows(self._kv, heads, dim, cache[index], None, tables)

    def _lists(
        self, xp: Any, pattern: Any, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[rows of queries, value_dim], float32."""
        out = xp.attend_ragged(queries, keys, values, pattern)
        return out[:, : self._value_dim] if values is keys else out

    def _weights(
        self, xp: Any, scores: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Softmax over the last dimension. scores: [rows, kv heads, queries, group, keys], which
        are overwritten; sinks: [num_heads], a logit of each head that no value belongs to."""
        cap = self.spec.softcap
        if cap:
            scores = xp.tanh(scores / cap) * cap
        if mask is not None:
            scores = scores.add_(mask)
        if sinks is None:
            return xp.softmax(scores, -1)
        rows, heads, queries, group, width = scores.shape
        column = sinks.float().reshape([1, heads, 1, group, 1])
        column = column.expand([rows, heads, queries, group, 1])
        return xp.softmax(xp.cat((scores, column), -1), -1)[..., :width].contiguous()

    def _short(
        self,
        xp: Any,
        group: _Group,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """[R, H, Q, G, value_dim], float32."""
        heads = self._heads
        per_head = group.num_queries * heads.group
        per_tile = heads.num_kv_heads * per_head
        products = group.num_tiles * heads.num_kv_heads
        tile_keys = self._rows(xp, keys, group.kv_rows).view([products, TILE, -1])
        tile_queries = xp.index_select(queries, 0, group.query_rows).view([products, per_head, -1])
        scores = xp.matmul_nt(tile_queries, tile_keys)
        if group.spread is not None:
            scores = xp.index_select(scores.view([-1, TILE]), 0, group.spread)
        width = group.max_tiles * TILE
        shape = [group.num_rows, heads.num_kv_heads, group.num_queries, heads.group, width]
        weights = self._weights(xp, scores.view(shape), group.mask, sinks)
        if group.collect is not None:
            weights = xp.index_select(weights.view([-1, TILE]), 0, group.collect)
        if values is keys:
            tile_values = tile_keys
        else:
            tile_values = self._rows(xp, values, group.kv_rows).view([products, TILE, -1])
        out = xp.matmul(weights.view([products, per_head, TILE]), tile_values)
        if group.spread is not None:
            parts = out.view([group.num_tiles, -1])
            out = xp.zeros([group.num_rows, parts.shape[1]], dtype=xp.float32, device=parts.device)
            out = xp.index_add_(out, 0, group.row_of_tile, parts)
        out = out.view([group.num_rows * per_tile, -1])
        return out[:, : self._value_dim] if values is keys else out

    def _long(
        self,
        xp: Any,
        kv_rows: Tensor,
        chunks: list[_Chunk],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """One sequence: writes its rows of out, [T * num_heads, value_dim] float32."""
        heads = self._heads
        shape = [heads.num_kv_heads, kv_rows.shape[1], -1]
        flat = kv_rows.flatten()
        own_keys = self._rows(xp, keys, flat).view(shape)
        own_values = own_keys if values is keys else self._rows(xp, values, flat).view(shape)
        for chunk in chunks:
            count = chunk.num_queries
            part = xp.index_select(queries, 0, chunk.query_rows)
            part = part.view([heads.num_kv_heads, heads.group, count, -1])
            some_keys, some_values = own_keys[:, chunk.keys], own_values[:, chunk.keys]
            if self.spec.sinks or self.spec.softcap:
                result = self._attend(xp, part, some_keys, some_values, chunk.mask, sinks)
            else:
                result = xp.attend(part, some_keys, some_values, chunk.mask, 1.0)
            result = result[..., : self._value_dim].reshape([-1, self._value_dim])
            xp.index_copy_(out, 0, chunk.query_rows, result)

    def _attend(
        self, xp: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """TensorLibrary.attend with capped logits or sinks."""
        heads, group, count, dim = q.shape
        scores = xp.matmul_nt(q.reshape([heads, group * count, dim]), keys)
        scores = scores.reshape([1, heads, group, count, keys.shape[1]]).transpose(2, 3)
        mask = None if mask is None else mask.reshape([1, 1, count, 1, keys.shape[1]])
        weights = self._weights(xp, scores.contiguous(), mask, sinks).transpose(2, 3)
        out = xp.matmul(weights.reshape([heads, group * count, keys.shape[1]]), values)
        return out.reshape([heads, group, count, values.shape[2]])

    def _mask(self, xp: Any, count: int, num_keys: int) -> Tensor | None:
        """[count, num_keys]: the last query sees all keys, the one before all but one, ..."""
        if count == 1:
            return None
        triangle = self._triangle[:count, :count]
        if num_keys == count:
            return triangle
        before = xp.zeros([count, num_keys - count], dtype=xp.float32, device=triangle.device)
        return xp.cat((before, triangle), 1)

    def _rows(self, xp: Any, pool: Tensor | QuantizedRows, rows: Tensor) -> Tensor:
        if self._kv is not None:
            return pool.take(rows)
        return self._wide(xp.index_select(pool, 0, rows))

    def _wide(self, x: Tensor) -> Tensor:
        return x if self._narrow is None else x.float()
