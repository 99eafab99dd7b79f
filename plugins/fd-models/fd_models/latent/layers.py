"""Multi-head latent attention (DeepSeek, arXiv 2412.19437) in its absorbed form.

The cache holds one row per token: the normalised latent, then the rotated shared key. Instead of
expanding it to keys and values of every head, the up-projections are moved to the query side and
the output side: q_nope (W_uk c) = (q_nope W_uk) c, and sum of p (W_uv c) = W_uv (sum of p c).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    PagedAttention,
    Placement,
    RMSNorm,
    StoredLayer,
    StoredPart,
)

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import Quantizer
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of latent attention; num_heads counts the whole model's heads."""

    hidden: int
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None = None


class LatentAttention:
    """x: [num_tokens, hidden]; so is the result. Every rank has the same latents; heads are
    divided."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        shape: LatentShape,
        spec: AttentionSpec,
        rotary: RotarySpec,
        *,
        bias: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        self._shape, self._heads = shape, spec.num_heads
        q_out = shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        self._q_norm = self._q_b = None
        if shape.q_lora_rank is None:
            first = LinearPart(f"{prefix}.q_proj", q_out, build.piece, has_bias=False)
        else:
            first = LinearPart(f"{prefix}.q_a_proj", shape.q_lora_rank)
            self._q_norm = RMSNorm(build, f"{prefix}.q_a_layernorm", shape.q_lora_rank, norm_eps)
            self._q_b = Linear(
                build,
                LinearShape(
                    f"{prefix}.q_b_proj",
                    [LinearPart(f"{prefix}.q_b_proj", q_out, build.piece)],
                    shape.q_lora_rank,
                    parallel="column",
                ),
            )
        latent = LinearPart(
            f"{prefix}.kv_a_proj_with_mqa", shape.kv_lora_rank + shape.qk_rope_head_dim
        )
        self._down = Linear(
            build,
            LinearShape(
                f"{prefix}.qkv_a_proj", [first, latent], shape.hidden, parallel="column", bias=bias
            ),
        )
        self._q_end, self._latent_end = first.rows, first.rows + shape.kv_lora_rank
        self._kv_norm = RMSNorm(build, f"{prefix}.kv_a_layernorm", shape.kv_lora_rank, norm_eps)
        self._up = _UpProjection(build, f"{prefix}.kv_b_proj", shape, spec.num_heads)
        self._output = Linear(
            build,
            LinearShape(
                f"{prefix}.o_proj",
                [LinearPart(f"{prefix}.o_proj", shape.hidden)],
                shape.num_heads * shape.v_head_dim,
                parallel="row",
                bias=bias,
            ),
        )
        self._paged = PagedAttention(build, prefix, spec, rotary)
        self._xp = build.xp

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        return self._output(self._values(self._attend(self._down(x), positions, context)))

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + attention(norm(t)) with t = x + residual, as Linear.add_to returns
        them. rows: [n] int64, the tokens that the result is needed for; attention still covers all
        tokens."""
        down, total = self._down.after(norm, x, residual)
        attended = self._attend(down, positions, context)
        attended, total = self._paged.select(rows, attended, total)
        return self._output.add_to(total, self._values(attended))

    def _attend(self, down: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The weighted latents of each head: [num_tokens, heads * kv_lora_rank]."""
        query, row = self._absorbed(down, self._low_rank(down), positions)
        rank = self._shape.kv_lora_rank
        return self._paged.attend(query, row, row[:, :, :rank], (row,), context)

    def _low_rank(self, down: Tensor) -> Tensor:
        """[num_tokens, q_lora_rank], normed; the queries where the family has no such product."""
        q = down[:, : self._q_end]
        return q if self._q_norm is None else self._q_norm(q)

    def _absorbed(self, down: Tensor, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [num_tokens, heads, kv_lora_rank + qk_rope_head_dim] and the rows that the cache
        holds, [num_tokens, 1, the same]. q: of _low_rank."""
        shape, xp, tokens = self._shape, self._xp, down.shape[0]
        nope = shape.qk_nope_head_dim
        q = q if self._q_b is None else self._q_b(q)
        q = q.reshape(tokens, self._heads, nope + shape.qk_rope_head_dim)
        latent = self._kv_norm(down[:, self._q_end : self._latent_end]).unsqueeze(1)
        k_rope = down[:, self._latent_end :].unsqueeze(1)
        q_rope = q[:, :, nope:]
        if not self._paged.rotates:
            q_rope, k_rope = self._paged.rotate(q_rope, k_rope, positions)
        query = xp.cat((self._up.queries(q[:, :, :nope]), q_rope), -1)
        return query, xp.cat((latent, k_rope), -1)

    def _values(self, attended: Tensor) -> Tensor:
        """The result of _attend as values: [num_tokens, heads * v_head_dim]."""
        shape, tokens = self._shape, attended.shape[0]
        values = self._up.values(attended.reshape(tokens, self._heads, shape.kv_lora_rank))
        return values.reshape(tokens, self._heads * shape.v_head_dim)


class _UpProjection:
    """kv_b_proj split into its key half and its value half, one matrix per head."""

    def __init__(self, build: ModelBuilder, name: str, shape: LatentShape, heads: int) -> None:
        self._xp, self._heads = build.xp, heads
        self._nope, self._v, self._rank = (
            shape.qk_nope_head_dim,
            shape.v_head_dim,
            shape.kv_lora_rank,
        )
        self._dtype = build.xp.dtype(build.dtype)
        self._key = build.zeros((heads, self._nope, self._rank), self._dtype)
        self._value = build.zeros((heads, self._rank, self._v), self._dtype)
        build.leave_unquantized(name)
        out = shape.num_heads * (self._nope + self._v)
        spec = LayerSpec(name, "linear", self._rank, out // build.tp_size, dtype=build.dtype)
        spec = replace(spec, parallel="column", shards=build.tp_size)
        quantizer = build.quantizer
        if quantizer is not None and quantizer.supports(spec) and quantizer.is_stored(spec):
            # The checkpoint holds it in few bits; in absorbed form it is computed in the model's
            # dtype.
            part = StoredPart(name, spec.out_features, build.piece)
            StoredLayer(build, quantizer, spec, [part], partial(self._widen, quantizer, spec))
            return
        build.weights.add(
            Placement(
                name=f"{name}.weight",
                shape=(out, self._rank),
                region=(build.piece.of(out), slice(0, self._rank)),
                accept=self._accept,
                is_linear=True,
            )
        )

    def _widen(self, quantizer: Quantizer, spec: LayerSpec, tensors: dict[str, Tensor]) -> None:
        self._accept(quantizer.dequantize(spec, tensors))

    def _accept(self, tensor: Tensor) -> None:
        per_head = tensor.to(self._dtype).reshape(self._heads, self._nope + self._v, self._rank)
        self._key[:] = per_head[:, : self._nope]
        self._value[:] = per_head[:, self._nope :].transpose(1, 2)

    def queries(self, q: Tensor) -> Tensor:
        """[num_tokens, heads, qk_nope_head_dim] to [num_tokens, heads, kv_lora_rank]."""
        return self._xp.matmul(q.transpose(0, 1), self._key).transpose(0, 1)

    def values(self, x: Tensor) -> Tensor:
        """[num_tokens, heads, kv_lora_rank] to [num_tokens, heads, v_head_dim]."""
        return self._xp.matmul(x.transpose(0, 1), self._value).transpose(0, 1)
