"""The layers of an EAGLE-3 checkpoint.

    g[t] = W [h_a[t]; h_b[t]; h_c[t]],  x = [norm(embedding(token[t + 1])); norm(g[t])]
    y = g[t] + attention(x);  a[t] = y + feed_forward(norm(y));  token[t + 2] ~ head(norm(a[t]))

h are hidden states between the target's blocks. For the next draft a[t] stands in the place of
g[t + 1] (arXiv 2503.01840, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.layers import HeadShape
from fastdeploy_core.models.reading import ConfigReader

from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import ExtensibleLM
    from fastdeploy_core.layers import ForwardContext
    from fastdeploy_core.tensor import Tensor

    from .layout import DraftFolder


class Eagle3Block:
    """Divided among ranks as the target's blocks are."""

    def __init__(self, target: ExtensibleLM, build: Any, draft: DraftFolder) -> None:
        """build: a layers.ModelBuilder of its own."""
        self._select = build.kernels["select_rows"]
        self._concat_norms = build.kernels["concat_rms_norm"]
        read = ConfigReader(draft.config, build.tp_size)
        read.require_activation("silu", "swish")
        hidden, eps = read.size("hidden_size"), read.number("rms_norm_eps", default=1e-6)
        build.weights.rename("model.", "")
        build.weights.rename("midlayer.", "layers.0.")
        self.projection = build.linear(
            "fc", len(draft.reads) * draft.target_hidden_size, hidden, quantize=False
        )
        self.vocabulary = Vocabulary(target, build, draft, read)
        self._embedding_norm = build.norm("layers.0.input_layernorm", hidden, eps)
        self._hidden_norm = build.norm("layers.0.hidden_norm", hidden, eps)
        self._from_norm = draft.norm_before_residual
        shape, bias = read.heads(), read.flag("attention_bias", default=False)
        self._attention = build.gqa(
            "layers.0.self_attn",
            HeadShape(hidden, shape.num_heads, shape.num_kv_heads, inputs=2 * hidden),
            read.gqa(build.dtype),
            read.rotary(read.head_dim()),
            qkv_bias=bias,
            output_bias=bias,
        )
        self._after_attention = build.norm("layers.0.post_attention_layernorm", hidden, eps)
        width, mlp_bias = read.size("intermediate_size"), read.flag("mlp_bias", default=False)
        read.divided("intermediate_size", width)
        self._feed_forward = build.mlp("layers.0.mlp", hidden, width, bias=mlp_bias)
        self._norm = build.norm("norm", hidden, eps)

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """ids [num_tokens] int64: the token after each one; hidden [num_tokens, hidden]: g, or a
        of the position before. Returns (what the head reads, a), of the tokens in rows [n] int64
        only; the cache gets all."""
        first, second = self._embedding_norm, self._hidden_norm
        embedded = self.vocabulary.embedding(ids)
        x = self._concat_norms(embedded, first.weight, hidden, second.weight, first.eps)
        residual = second(hidden) if self._from_norm else hidden
        attended = self._attention(x, positions, context)
        if rows is not None:
            attended, residual = self._select(attended, rows), self._select(residual, rows)
        x, residual = self._feed_forward.after(self._after_attention, attended, residual)
        normed, total = self._norm.add(x, residual)
        return normed, total
