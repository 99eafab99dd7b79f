"""Stand-ins for Gaudi's fused operators, strict about what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
from fd_simdevice.stand_in import StandIn, check, like, read, rotate, write

from fastdeploy_core.contracts.attention import AttentionSpec


class GaudiOperators(StandIn):
    """As FastDeploy 2.x called them, for layers of one shape."""

    def __init__(self, spec: AttentionSpec, hidden: int, block_size: int) -> None:
        super().__init__()
        self.spec, self.hidden, self.block_size = spec, hidden, block_size
        self.shapes: set[tuple[Any, ...]] = set()

    def _project(
        self, x: Any, weight: Any, bias: Any, rotary: Any, rows: int, is_neox: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values [rows, tokens, heads, dim]; the first two rotated."""
        spec = self.spec
        heads, width = spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
        tokens = x.shape[0] // rows
        check(x, spec.dtype, rows * tokens, self.hidden)
        check(weight, spec.dtype, self.hidden, heads * width)
        check(rotary, spec.dtype, 2, rows, tokens, 1, width)
        assert is_neox == (not spec.rotary_interleaved)
        joined = read(x) @ read(weight)
        if bias is not None:
            check(bias, spec.dtype, heads * width)
            joined = joined + read(bias)
        joined = joined.reshape(rows * tokens, heads, width)
        picks = slice(0, width // 2) if is_neox else slice(0, None, 2)
        cos, sin = (part.reshape(-1, width)[:, picks] for part in read(rotary))
        turned = spec.num_heads + spec.num_kv_heads
        joined[:, :turned] = rotate(joined[:, :turned], cos, sin, is_neox)
        joined = joined.reshape(rows, tokens, heads, width)
        return joined[:, :, : spec.num_heads], *(
            joined[:, :, first : first + spec.num_kv_heads] for first in (spec.num_heads, turned)
        )

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """q [tokens, heads, dim], k and v [keys, kv_heads, dim], mask [tokens, keys]."""
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("thd,khd->htk", q, k) * self.spec.scale + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("htk,khd->thd", weights / weights.sum(-1, keepdims=True), v)

    def _output(self, out: np.ndarray, weight: Any) -> np.ndarray:
        check(weight, self.spec.dtype, self.spec.num_heads * self.spec.head_dim, self.hidden)
        return out.reshape(-1, self.spec.num_heads * self.spec.head_dim) @ read(weight)

    def index_copy_(self, target: Any, index: Any, source: Any, dimension: int) -> None:
        self.count("copy")
        check(index, "int64", source.shape[0])
        assert dimension == 0 and (read(index) >= 0).all()
        values = read(target)
        values[read(index)] = read(source)
        write(target, values)

    def fused_qkv_rope(
        self, x: Any, weight: Any, bias: Any, rotary: Any, head_dim: int, num_heads: int, rows: int,
        *, transpose: bool, use_neox_style: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        self.count("qkv")
        self.shapes.add(("prompts", rows, x.shape[0]))
        assert (head_dim, num_heads) == (self.spec.head_dim, self.spec.num_heads) and not transpose
        q, k, v = self._project(x, weight, bias, rotary, rows, use_neox_style)
        return like(x, q), like(x, np.stack((k, v)))

    def fused_sdpa_proj_t(
        self, q: Any, kv: Any, mask: Any, sink: Any, weight: Any,
        *, scaling_factor: float, causal: bool, softmax_mode: int,
    ) -> Any:  # fmt: skip
        self.count("prompts")
        spec, (rows, tokens) = self.spec, q.shape[:2]
        check(q, spec.dtype, rows, tokens, spec.num_heads, spec.head_dim)
        check(kv, spec.dtype, 2, rows, None, spec.num_kv_heads, spec.head_dim)
        check(mask, spec.dtype, rows, 1, tokens, kv.shape[2])
        assert sink is None and not causal and softmax_mode == 0 and scaling_factor == spec.scale
        queries, (keys, values), hidden = read(q), read(kv), read(mask)
        out = [self._attend(queries[r], keys[r], values[r], hidden[r, 0]) for r in range(rows)]
        return like(q, self._output(np.stack(out), weight).reshape(rows, tokens, -1))

    def fused_block_attention(
        self, x: Any, rotary: Any, k_cache: Any, v_cache: Any, groups: Any, blocks: Any,
        mapping: Any,
        mask: Any, indices: Any, offsets: Any, qkv: Any, bias: Any, output: Any, head_dim: int,
        num_heads: int, *, scaling_factor: float, transpose: bool, use_neox_style: bool,
    ) -> Any:  # fmt: skip
        self.count("decodes")
        spec, rows, listed = self.spec, x.shape[0], blocks.shape[0]
        self.shapes.add(("decodes", rows, listed))
        assert (head_dim, num_heads, transpose) == (spec.head_dim, spec.num_heads, False)
        assert scaling_factor == spec.scale
        for index, size in ((groups, listed), (blocks, listed), (indices, rows), (offsets, rows)):
            check(index, "int32", size)
        check(mapping, spec.dtype, listed, rows)
        check(mask, spec.dtype, listed, self.block_size)
        assert np.array_equal(read(mapping), read(groups)[:, None] == np.arange(rows))
        q, k, v = self._project(x, qkv, bias, rotary, rows, use_neox_style)
        pools = []
        for cache, fresh in ((k_cache, k), (v_cache, v)):
            check(cache, spec.dtype, None, self.block_size, spec.num_kv_heads, spec.head_dim)
            pool = read(cache)
            pool[read(indices), read(offsets)] = fresh[:, 0]
            write(cache, pool)
            pools.append(pool)
        out = []
        for row in range(rows):
            own = read(groups) == row
            keys, values = (
                pool[read(blocks)[own]].reshape(-1, spec.num_kv_heads, spec.head_dim)
                for pool in pools
            )
            out.append(self._attend(q[row], keys, values, read(mask)[own].reshape(1, -1)))
        return like(x, self._output(np.concatenate(out), output))
