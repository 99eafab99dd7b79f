"""Grouped-query attention of families that do more between projections and cache than
`build.gqa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.errors import UnsupportedModel
from fastdeploy_core.layers import (
    ForwardContext,
    Linear,
    LinearPart,
    LinearShape,
    PagedAttention,
    RMSNorm,
    RotarySpec,
)
from fastdeploy_core.models.reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.tensor import Tensor


class ProjectedAttention:
    """Projections, and a driver of any unit but projections; subclasses say what is between."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        read: ConfigReader,
        spec: AttentionSpec,
        rotary: RotarySpec,
    ) -> None:
        shape, dim, self._spec = read.heads(), spec.head_dim, spec
        counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        parts = [
            LinearPart(f"{prefix}.{part}_proj", count * dim, build.piece)
            for part, count in counts.items()
        ]
        bias = read.flag("attention_bias", default=False)
        column = LinearShape(
            f"{prefix}.qkv_proj", parts, shape.hidden, parallel="column", bias=bias
        )
        self._qkv = Linear(build, column)
        name, width = f"{prefix}.o_proj", shape.num_heads * dim
        self._output = build.linear(name, width, shape.hidden, bias=bias, parallel="row")
        self.paged = PagedAttention(build, prefix, spec, rotary)
        needs_own_projections(self.paged, prefix)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor:
        """q: [num_tokens, heads, head_dim], k and v likewise; what `paged.attend` returns."""
        raise NotImplementedError

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        return self._output(self._attend(self._qkv(x), positions, context))

    def after(
        self,
        norm: RMSNorm,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As AttentionLayer.after."""
        qkv, total = self._qkv.after(norm, x, residual)
        attended = self._attend(qkv, positions, context)
        attended, total = self.paged.select(rows, attended, total)
        return self._output.add_to(total, attended)

    def _attend(self, qkv: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        spec = self._spec
        both = spec.num_heads + spec.num_kv_heads
        heads = qkv.reshape([qkv.shape[0], both + spec.num_kv_heads, spec.head_dim])
        q, k, v = heads[:, : spec.num_heads], heads[:, spec.num_heads : both], heads[:, both:]
        return self.attend(q, k, v, positions, context)


def needs_own_projections(paged: PagedAttention, prefix: str) -> None:
    """Refuse a driver that computes projections itself: these layers have more between them."""
    if paged.backend.unit == "projections":
        raise UnsupportedModel(
            f"attention driver {paged.backend.name!r} computes projections itself, but "
            f"{prefix} has more between them; possible: a driver of another unit; run: "
            "fastdeploy plugins why attention --model DIR"
        )


def whole_heads(read: ConfigReader) -> None:
    """Refuse more ranks than key heads: ProjectedAttention gives none of them to two."""
    if read.tp_size > read.heads().num_kv_heads:
        read.divided("num_key_value_heads", read.heads().num_kv_heads)
