"""Grouped-query attention: one product for q, k and v, rotation, cache write, the driver, output.

Heads are divided among ranks; with more ranks than key-value heads, each of these heads is held by
several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.attention import AttentionSpec

from .context import ForwardContext
from .linear import Linear, LinearPart, Piece
from .norm import RMSNorm

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .rotary import RotarySpec


class PagedAttention:
    """The part between projections, for either unit a driver claims; "gqa" and "mla" share it."""

    def __init__(self, build: ModelBuilder, spec: AttentionSpec, rotary: RotarySpec) -> None:
        self.spec, self.index = spec, build.add_kv_layer(spec)
        self.backend = build.attention(spec)
        self.cos_sin = build.cos_sin(rotary)
        self._rotary, self._write = build.kernels["rotary_embedding"], build.kernels["kv_write"]
        self._interleaved = rotary.interleaved
        self.rotates = self.backend.unit == "rope_kv"

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q: [num_tokens, heads, dim], k: [num_tokens, kv_heads, dim]."""
        return self._rotary(q, k, positions, self.cos_sin, self._interleaved)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, ...], context: ForwardContext
    ) -> Tensor:
        """Write `rows` to the cache and attend; see AttentionBackend.forward for the shapes."""
        cache, metadata = context.caches[self.index], context.metadata[self.spec]
        if self.rotates:
            return self.backend.forward(q, k, v, cache, metadata, self.cos_sin)
        self._write(rows, cache, context.batch.slot_mapping)
        return self.backend.forward(q, k, v, cache, metadata)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Widths of grouped-query attention; head counts are of the whole model."""

    hidden: int
    num_heads: int
    num_kv_heads: int


class Attention:
    """x: [num_tokens, hidden] to the same. `norm_eps` adds the normalisation of each query and key
    head (Qwen3)."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        shape: HeadShape,
        spec: AttentionSpec,
        rotary: RotarySpec,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        dim = spec.head_dim
        count = min(build.tp_size, shape.num_kv_heads)
        kv_piece = Piece(build.tp_rank * count // build.tp_size, count)
        self.qkv = Linear(
            build,
            f"{prefix}.qkv_proj",
            [
                LinearPart(f"{prefix}.q_proj", shape.num_heads * dim, build.piece),
                LinearPart(f"{prefix}.k_proj", shape.num_kv_heads * dim, kv_piece),
                LinearPart(f"{prefix}.v_proj", shape.num_kv_heads * dim, kv_piece),
            ],
            shape.hidden,
            parallel="column",
            bias=qkv_bias,
        )
        self.output = Linear(
            build,
            f"{prefix}.o_proj",
            [LinearPart(f"{prefix}.o_proj", shape.hidden)],
            shape.num_heads * dim,
            parallel="row",
            bias=output_bias,
        )
        self.q_norm = self.k_norm = None
        self._qk_norm = build.kernels["qk_norm"]
        if norm_eps is not None:
            self.q_norm = RMSNorm(build, f"{prefix}.q_norm", dim, norm_eps)
            self.k_norm = RMSNorm(build, f"{prefix}.k_norm", dim, norm_eps)
        self.paged = PagedAttention(build, spec, rotary)
        self._heads, self._kv_heads, self._dim = spec.num_heads, spec.num_kv_heads, dim
        self._k_end = spec.num_heads + spec.num_kv_heads

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        return self.output(self._attend(self.qkv(x), positions, context))

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of the sum t = x + residual and of attention to norm(t), as Linear.add_to returns
        them."""
        qkv, total = self.qkv.after(norm, x, residual)
        return self.output.add_to(total, self._attend(qkv, positions, context))

    def _attend(self, qkv: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        # One view of all heads, then three slices of it: fewer calls than cutting first.
        heads = qkv.reshape(qkv.shape[0], self._k_end + self._kv_heads, self._dim)
        q = heads[:, : self._heads]
        k = heads[:, self._heads : self._k_end]
        v = heads[:, self._k_end :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._qk_norm(q, k, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        if not self.paged.rotates:
            q, k = self.paged.rotate(q, k, positions)
        return self.paged.attend(q, k, v, (k, v), context)
