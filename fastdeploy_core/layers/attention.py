"""Grouped-query attention: one product for q, k and v, rotation, cache write, the driver, output.

Heads are divided among ranks. With more ranks than key-value heads, several ranks hold the same
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.attention import AttentionSpec, HeadNorms, Projections
from fastdeploy_core.contracts.kv_formats import kv_format
from fastdeploy_core.errors import UnsupportedModel

from .cache_scales import CacheScales
from .context import ForwardContext
from .linear import Linear, LinearPart, LinearShape
from .norm import DividedRMSNorm, RMSNorm
from .stored import WHOLE, Piece
from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBackend
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .rotary import RotarySpec


class PagedAttention:
    """The part between the projections, for any unit that a driver claims, such as "gqa", "mla"."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotarySpec,
        kv_piece: Piece = WHOLE,
    ) -> None:
        spec = build.cache_spec(spec)
        if rotary.kind != "none":  # drivers read it in the spec; the loader compares both
            spec = replace(spec, rotary_interleaved=rotary.interleaved)
        self.spec, self.index = spec, build.add_kv_layer(spec)
        self.backend: AttentionBackend = build.attention(spec)
        self.cos_sin = build.cos_sin(rotary)
        self._rotary, self._interleaved = build.kernels["rotary_embedding"], rotary.interleaved
        self.rotates = self.backend.unit != "core"
        self.norms_heads = self.rotates and getattr(self.backend, "norms_heads", False)
        kind = kv_format(spec.kv_format)
        self._is_quantized = kind is not None
        # A driver that writes the cache itself needs no kernel for it.
        if not self.rotates:
            self._write = build.kernels["kv_write" if kind is None else kind.write]
        self._scales = CacheScales(build, prefix, spec, kv_piece) if spec.kv_static else None
        self._select_rows = build.kernels["select_rows"]
        self._sinks = self._place_sinks(build, prefix) if spec.sinks else None

    def _place_sinks(self, build: ModelBuilder, prefix: str) -> Tensor:
        """[num_heads] float32, divided among ranks as query heads are."""
        sinks = build.zeros((self.spec.num_heads,), build.xp.float32)

        def accept(tensor: Tensor) -> None:
            sinks[:] = tensor.float()

        whole = self.spec.num_heads * build.piece.count
        build.weights.add(Placement(f"{prefix}.sinks", (whole,), (build.piece.of(whole),), accept))
        return sinks

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q: [num_tokens, heads, dim], k: [num_tokens, kv_heads, dim]. table: ForwardContext's."""
        table = self.cos_sin if table is None else table
        turned: tuple[Tensor, Tensor] = self._rotary(q, k, positions, table, self._interleaved)
        return turned

    def select(self, rows: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of each [num_tokens, width] that layers behind the attention read; None: all."""
        if rows is None:
            return tensors
        return tuple(self._select_rows(x, rows) for x in tensors)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, ...],
        context: ForwardContext,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Write `rows` to the cache and attend; see AttentionBackend.forward for the shapes.
        `norms`: query and key norms that the driver applies itself."""
        cache, metadata = context.caches[self.index], context.metadata[self.spec]
        rotary = None
        if self.rotates:
            rotary = self.cos_sin if context.rotary is None else context.rotary
        # A driver takes only the parameters of what it claims.
        own: dict[str, Any] = {}
        if self._is_quantized:
            own["scales"] = None if self._scales is None else self._scales.value
        if not self.rotates:
            self._write(rows, cache, context.batch_of(self.spec).slot_mapping, *own.values())
        if norms is not None:
            own["norms"] = norms
        if self._sinks is not None:
            own["sinks"] = self._sinks
        return self.backend.forward(q, k, v, cache, metadata, rotary, **own)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Widths of grouped-query attention; head counts are of the whole model."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    norm_whole: bool = False  # norms of queries and keys, if there are any, are over all heads
    inputs: int = 0  # width of what is attended to, if it is not hidden


class Attention:
    """x: [num_tokens, hidden]; so is the result. `norm_eps`: also normalise queries and keys, each
    head (Qwen3) or, with shape.norm_whole, all heads of a token at once (OLMo 2)."""

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
            LinearShape(
                f"{prefix}.qkv_proj",
                [
                    LinearPart(f"{prefix}.q_proj", shape.num_heads * dim, build.piece),
                    LinearPart(f"{prefix}.k_proj", shape.num_kv_heads * dim, kv_piece),
                    LinearPart(f"{prefix}.v_proj", shape.num_kv_heads * dim, kv_piece),
                ],
                shape.inputs or shape.hidden,
                parallel="column",
                bias=qkv_bias,
            ),
        )
        self.output = Linear(
            build,
            LinearShape(
                f"{prefix}.o_proj",
                [LinearPart(f"{prefix}.o_proj", shape.hidden)],
                shape.num_heads * dim,
                parallel="row",
                bias=output_bias,
            ),
        )
        self._norms: HeadNorms | None = None
        self._whole_norms: tuple[DividedRMSNorm, DividedRMSNorm] | None = None
        self._qk_norm = build.kernels["qk_norm"]
        if norm_eps is not None:
            self._make_norms(build, prefix, shape, dim, norm_eps, kv_piece)
        self.paged = PagedAttention(build, prefix, spec, rotary, kv_piece)
        self._driver_norms = self.paged.norms_heads
        # A driver that also claims the projections, and the weights in its own layout. It would
        # leave these norms, and adapters, out.
        has_more = self._whole_norms is not None or build.adapters is not None
        if self.paged.backend.unit == "projections" and has_more:
            raise UnsupportedModel(
                f"attention driver {self.paged.backend.name!r} computes projections itself, but "
                f"{prefix} normalises all heads at once after them, or has LoRA adapters beside "
                "them; possible: a driver of another unit; run: fastdeploy plugins why attention "
                "--model DIR"
            )
        self._block: Any = self.paged.backend if self.paged.backend.unit == "projections" else None
        self._projections: Any = None
        self._heads, self._kv_heads, self._dim = spec.num_heads, spec.num_kv_heads, dim
        self._k_end = spec.num_heads + spec.num_kv_heads

    def _make_norms(
        self,
        build: ModelBuilder,
        prefix: str,
        shape: HeadShape,
        dim: int,
        eps: float,
        kv_piece: Piece,
    ) -> None:
        of_q, of_k = f"{prefix}.q_norm", f"{prefix}.k_norm"
        if shape.norm_whole:
            q_size, k_size = shape.num_heads * dim, shape.num_kv_heads * dim
            self._whole_norms = (
                DividedRMSNorm(build, of_q, q_size, eps, build.piece),
                DividedRMSNorm(build, of_k, k_size, eps, kv_piece),
            )
            return
        q, k = RMSNorm(build, of_q, dim, eps), RMSNorm(build, of_k, dim, eps)
        self._norms = HeadNorms(q.weight, k.weight, eps)

    def __call__(self, x: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden], model dtype; positions: [num_tokens] int64."""
        if self._block is not None:
            return self._whole(x, context)
        return self.output(self._attend(self.qkv(x), positions, context))

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
        if self._block is not None:
            normed, total = norm.add(x, residual)
            (total,) = self.paged.select(rows, total)
            return self._whole(normed, context, rows), total
        qkv, total = self.qkv.after(norm, x, residual)
        attended = self._attend(qkv, positions, context)
        attended, total = self.paged.select(rows, attended, total)
        return self.output.add_to(total, attended)

    def _whole(self, x: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """The driver computes the whole layer, for all tokens."""
        if self._projections is None:
            qkv, output = self.qkv.weight, self.output.weight
            self._projections = self._block.prepare_projections(
                Projections(qkv, self.qkv.bias, output)
            )
            self.qkv.weight = self.output.weight = None
        paged = self.paged
        y = self._block.forward_block(
            x,
            self._projections,
            context.caches[paged.index],
            context.metadata[paged.spec],
            paged.cos_sin if context.rotary is None else context.rotary,
        )
        (y,) = paged.select(rows, y)
        return self.output.finish(y)

    def _attend(self, qkv: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        # One view of all heads, then three slices: fewer calls than splitting first.
        heads = qkv.reshape(qkv.shape[0], self._k_end + self._kv_heads, self._dim)
        q = heads[:, : self._heads]
        k = heads[:, self._heads : self._k_end]
        v = heads[:, self._k_end :]
        if self._whole_norms is not None:
            q, k = self._whole_norms[0](q), self._whole_norms[1](k)
        if self._norms is not None and not self._driver_norms:
            q, k = self._qk_norm(q, k, self._norms.q, self._norms.k, self._norms.eps)
        if not self.paged.rotates:
            q, k = self.paged.rotate(q, k, positions, context.rotary)
        norms = self._norms if self._driver_norms else None
        return self.paged.attend(q, k, v, (k, v), context, norms)
