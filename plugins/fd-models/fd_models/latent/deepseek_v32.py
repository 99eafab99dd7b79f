"""DeepSeek V3.2 (transformers: DeepseekV32ForCausalLM; arXiv 2512.02556): DeepSeek V3 whose
attention is to the keys that an indexer likes best.

Up to index_topk tokens that is all of them, so that shorter contexts are those of DeepSeek V3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fastdeploy_core.contracts.model import AttentionSpec, IndexSpec
from fastdeploy_core.layers import ForwardContext, Linear, LinearPart, LinearShape, RMSNorm
from fastdeploy_core.models.reading import ConfigReader

from .deepseek_v3 import DeepseekV3ForCausalLM
from .layers import LatentAttention, LatentShape

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder, RotarySpec
    from fastdeploy_core.tensor import Tensor


class SparseLatentAttention(LatentAttention):
    """Every rank has the whole indexer, and so chooses the same keys."""

    index_interleaved: ClassVar[bool] = False  # which pairs of the indexer's channels turn

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
        super().__init__(build, prefix, shape, spec, rotary, bias=bias, norm_eps=norm_eps)
        index, name = cast("IndexSpec", spec.index), f"{prefix}.indexer"
        heads, dim, self._turning = index.num_heads, index.dim, shape.qk_rope_head_dim
        self._heads_and_dim = heads, dim
        self._queries = build.linear(f"{name}.wq_b", cast("int", shape.q_lora_rank), heads * dim)
        self._key = build.linear(f"{name}.wk", shape.hidden, dim)
        self._key_norm = build.layer_norm(f"{name}.k_norm", dim, 1e-6)
        weights = [LinearPart(f"{name}.weights_proj", heads)]
        self._weights = Linear(
            build,
            LinearShape(
                f"{name}.weights_proj", weights, shape.hidden, quantize=False, is_float32=True
            ),
        )
        self._scores = build.kernels["linear_float32"]
        self._rotate = build.kernels["rotary_embedding"]

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        return self._output(self._values(self._look_up(x, positions, context)))

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As LatentAttention.after."""
        normed, total = norm.add(x, residual)
        attended = self._look_up(normed, positions, context)
        attended, total = self._paged.select(rows, attended, total)
        return self._output.add_to(total, self._values(attended))

    def _look_up(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """As LatentAttention._attend, of the layer's input."""
        down, paged = self._down(x), self._paged
        low = self._low_rank(down)
        query, row = self._absorbed(down, low, positions)
        index, rank = self._indexed(x, low, positions), self._shape.kv_lora_rank
        cache, metadata = context.caches[paged.index], context.metadata[paged.spec]
        backend: Any = paged.backend  # of those that declare "index"
        attended: Tensor = backend.forward(
            query, row, row[:, :, :rank], cache, metadata, index=index
        )
        return attended

    def _indexed(self, x: Tensor, low: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries [num_tokens, heads, dim], keys [num_tokens, 1, dim] and weights
        [num_tokens, heads] float32."""
        xp, (heads, dim) = self._xp, self._heads_and_dim
        q = self._queries(low).reshape([x.shape[0], heads, dim])
        k = self._key_norm(self._key(x)).reshape([x.shape[0], 1, dim])
        end = self._turning
        turned = (q[:, :, :end], k[:, :, :end], positions, self._paged.cos_sin)
        q_turned, k_turned = self._rotate(*turned, self.index_interleaved)
        weights = self._scores(x, self._weights.weight) * (heads * dim) ** -0.5
        both = (xp.cat([q_turned, q[:, :, end:]], -1), xp.cat([k_turned, k[:, :, end:]], -1))
        return (*both, weights)


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """Blocks may say by mlp_layer_types whether they have experts."""

    attention_layer = SparseLatentAttention

    @classmethod
    def attention_spec(cls, read: ConfigReader, dtype: str) -> AttentionSpec:
        """With an indexer, which reads the low-rank queries."""
        read.size("q_lora_rank")
        index = IndexSpec(
            num_heads=read.size("index_n_heads", default=64),
            dim=read.size("index_head_dim", default=128),
            top_k=read.size("index_topk", default=2048),
        )
        return replace(super().attention_spec(read, dtype), index=index)
