"""Linear layers: one product per call, however many checkpoint tensors were joined into the weight.

Tensor parallel: a column layer divides outputs among ranks; a row layer divides inputs and sums the
results over ranks. Embedding and lm head divide the vocabulary and are in embedding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.quantizer import LayerPart, LayerSpec, PackingQuantizer, Quantizer

from .stored import WHOLE, Piece, StoredLayer, StoredPart
from .weight_map import FusedPart, Placement

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One checkpoint matrix [out_features, in_features] and the share of its outputs kept here."""

    name: str  # checkpoint prefix, without ".weight"
    out_features: int  # of the whole matrix
    piece: Piece = WHOLE
    has_bias: bool = True  # if the layer has biases
    padding: int = 0  # outputs after these on every rank, all 0

    @property
    def rows(self) -> int:
        """Outputs on this rank."""
        return self.out_features // self.piece.count + self.padding


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer: which checkpoint matrices it joins, and what it does around the product."""

    name: str  # names the layer in reports, and a checkpoint's tensor that holds all parts
    parts: Sequence[LinearPart]
    in_features: int  # of the whole matrix
    parallel: Literal["none", "column", "row"] = "none"
    bias: bool = False
    reduce: bool = True  # a row layer: sum over ranks; False: the caller does so
    gated: bool = False  # outputs are gate values then up values; the result is silu(gate) * up
    quantize: bool = True  # False: in full precision with every quantizer
    role: Literal["linear", "lm_head"] = "linear"
    is_float32: bool = False  # weight and product are float32, with every model dtype
    padding: int = 0  # inputs after in_features on every rank, which change nothing


_BEFORE = ("add_rms_norm", "silu_and_mul")


@dataclass(frozen=True, slots=True)
class _Packed:
    """A weight for the kernel of its number format. `after_norm` and `after_silu`: kernels that
    fuse the preceding norm or activation with the first part of that kernel, if there are any."""

    product: Callable[..., Any]
    weight: Any
    after_norm: Callable[..., Any] | None
    after_silu: Callable[..., Any] | None


class Linear:
    """y = x W^T + b for the joined parts, optionally summed over ranks.

    x: [num_tokens, in_features of this rank], model dtype; y: [num_tokens, sum of part.rows], or
    half as many with `gated`: the outputs are gate values then up values, and y is silu(gate) * up.
    `weight` is in the layout of the plain operations' kernel; None if another kernel or a quantizer
    multiplies.

    A norm or an activation precedes a linear layer, and a sum follows it. One kernel may compute
    both, so layers call `after`, `feed` and `add_to`. A residual that was not added yet is passed
    along beside x, and the next norm adds it.
    """

    def __init__(self, build: ModelBuilder, shape: LinearShape) -> None:
        name, parallel, bias = shape.name, shape.parallel, shape.bias
        dtype = "float32" if shape.is_float32 else build.dtype
        self._build, self._parts = build, list(shape.parts)
        self._in_piece = build.piece if parallel == "row" else WHOLE
        self._in_full = shape.in_features
        self._in = shape.in_features // self._in_piece.count + shape.padding
        self._gated = shape.gated
        self._kernel = "linear_float32" if shape.is_float32 else "linear"
        self._product, self._silu = build.kernels["linear"], build.kernels["silu_and_mul"]
        self._activation = self._silu
        self._packed: _Packed | None = None
        self._norm_product = build.kernels["norm_linear"]
        self._gated_product = build.kernels["gated_linear"]
        self._add_product = build.kernels["linear_add"]
        is_sum = parallel == "row" and shape.reduce and build.tp_size > 1
        self._reduce = build.all_reduce if is_sum else None
        self._dtype = build.xp.dtype(dtype)
        self.weight: Any = None
        self.bias: Tensor | None = None
        self.spec = LayerSpec(
            name=name,
            role=shape.role,
            in_features=self._in,
            out_features=sum(part.rows for part in self._parts),
            dtype=dtype,
            has_bias=bias,
            parallel=parallel,
            parts=tuple(LayerPart(part.name, part.rows) for part in self._parts),
            shards=1 if parallel == "none" else build.tp_size,
        )
        self._adapter: Any = None  # an AdaptedLinear of fd-lora
        if build.adapters is not None and not shape.is_float32 and shape.role == "linear":
            pieces = [part.piece for part in self._parts]
            self._adapter = build.adapters.layer(build, self.spec, pieces, self._in_piece)
        if self._adapter is not None:
            products = self._adapter.products(feeds_norm=shape.reduce)
            self._product, self._norm_product, self._gated_product, self._add_product = products
        elif shape.gated:
            self._kernel = "gated_linear"
        quantizer = build.quantizer_for(self.spec) if shape.quantize else None
        self._quantizer = quantizer
        # One quantized product, or one per part if the format cannot join the parts.
        self._products: list[tuple[LayerSpec, Any]] = []
        self._outstanding = 0
        self.weight = build.place(name, self._place)
        if self.weight is not None:
            self._quantizer = None  # the weight was laid out for the plain kernels
        if bias:
            self._place_bias()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features of this rank] to [num_tokens, out_features of this rank]."""
        if self._gated and self._is_plain:
            y = self._gated_product(x, None, 0.0, self.weight, self.bias)
        else:
            y = self._multiply(x)
            y = self._activation(y) if self._gated else y
        return y if self._reduce is None else self._reduce(y)

    @property
    def _is_plain(self) -> bool:
        """Whether the operations for plain weights multiply this weight."""
        return self._quantizer is None and self._packed is None

    def _multiply(self, x: Tensor) -> Tensor:
        if self._quantizer is not None:
            y = self._quantized(self._quantizer, x)
        elif self._packed is not None:
            y = self._packed.product(x, self._packed.weight, self.bias)
        else:
            return self._product(x, self.weight, self.bias)
        return y if self._adapter is None else self._adapter(y, x)

    def finish(self, y: Tensor) -> Tensor:
        """Add bias and sum over ranks, for a product that was computed elsewhere."""
        y = y if self.bias is None else y + self.bias
        return y if self._reduce is None else self._reduce(y)

    def _quantized(self, quantizer: Quantizer, x: Tensor) -> Tensor:
        if len(self._products) == 1:
            spec, prepared = self._products[0]
            return quantizer.apply(spec, prepared, x, self.bias)
        xp = self._build.xp
        y = xp.cat([quantizer.apply(s, prepared, x, None) for s, prepared in self._products], -1)
        return y if self.bias is None else y + self.bias

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(this layer's y for norm(x + residual), x + residual). residual None: nothing to add."""
        if self._is_plain and self._reduce is None:
            product = self._gated_product if self._gated else self._norm_product
            operands = (x, norm.weight, norm.eps, self.weight, self.bias)
            if residual is None:
                return product(*operands), x
            if self._adapter is not None and self._adapter.takes(residual):
                y, total = product(*operands, residual)
                return y, total
        packed = self._packed
        if residual is None or packed is None or packed.after_norm is None:
            normed, total = norm.add(x, residual)
        else:
            normed, total = packed.after_norm(x, residual, norm.weight, norm.eps, packed.weight)
        return self(normed), total

    def feed(self, other: Linear) -> None:
        """This gated layer's result goes to `other` only, so one kernel may compute the activation
        and the first part of the other layer."""
        self._activation = other._activated

    def _activated(self, x: Tensor) -> Any:
        """silu_and_mul of x [num_tokens, 2 * in_features], in the form that this product takes."""
        packed = self._packed
        if packed is None or packed.after_silu is None:
            return self._silu(x)
        return packed.after_silu(x, packed.weight)

    def add_to(self, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Two addends of total + y; None: they were added already. total may be overwritten."""
        if self._is_plain and self._reduce is None and not self._gated:
            y = self._add_product(x, self.weight, self.bias, total)
            return (y, None) if self._adapter is None else y
        return self(x), total

    def _product_specs(self) -> list[LayerSpec]:
        if self._joins:
            return [self.spec]
        return [
            replace(self.spec, name=part.name, out_features=part.rows, parts=())
            for part in self._parts
        ]

    def _offsets(self) -> list[int]:
        starts = [0]
        for part in self._parts:
            starts.append(starts[-1] + part.rows)
        return starts[:-1]

    def _place(self) -> None:
        quantizer = self._quantizer
        if quantizer is None:
            self._place_weight()
            return
        self._joins = quantizer.joins(self.spec)
        self._products = [(spec, None) for spec in self._product_specs()]
        if self._build.is_stored(self.spec):
            self._place_stored(quantizer)
        else:
            self._place_weight()

    def _place_weight(self) -> None:
        self._outstanding = len(self._parts)
        for part, start in zip(self._parts, self._offsets(), strict=True):
            self._build.weights.add(
                Placement(
                    name=f"{part.name}.weight",
                    shape=(part.out_features, self._in_full),
                    region=(part.piece.of(part.out_features), self._in_piece.of(self._in_full)),
                    accept=partial(self._accept_weight, start),
                    is_linear=True,
                )
            )
        self._offer_fused("weight", (self._in_full,))

    def _accept_weight(self, start: int, tensor: Tensor) -> None:
        if self.weight is None:
            # Allocated late, so that online quantization holds one whole layer at a time.
            shape = (self.spec.out_features, self._in)
            is_padded = self._in > tensor.shape[1] or any(part.padding for part in self._parts)
            make = self._build.zeros if is_padded else self._build.empty
            self.weight = make(shape, self._dtype)
        rows, columns = (int(size) for size in tensor.shape)
        self.weight[start : start + rows, :columns] = tensor.to(self._dtype)
        self._outstanding -= 1
        if self._outstanding:
            return
        if self._quantizer is None:
            prepared = self._build.kernels.prepare(self._kernel, self.weight)
            self.weight = self._build.keep(self.spec.name, prepared)
        else:
            whole, self.weight, first = self.weight, None, 0
            for number, (spec, _) in enumerate(self._products):
                rows = whole[first : first + spec.out_features]
                self._take(self._quantizer, number, self._quantizer.quantize(spec, rows))
                first += spec.out_features
            self._build.release(whole)

    def _take(self, quantizer: Quantizer, number: int, tensors: dict[str, Tensor]) -> None:
        """All quantized tensors of one product have arrived."""
        spec, _ = self._products[number]
        self._build.hold(tensors)
        packed: PackedWeight | None = None
        if len(self._products) == 1 and isinstance(quantizer, PackingQuantizer):
            packed = quantizer.packed(spec, tensors)
        if packed is None:
            self._products[number] = (spec, quantizer.prepare(spec, tensors))
            return
        self._quantizer, kernels = None, self._build.kernels
        if kernels.takes(self._kernel, packed.format.name):
            prepared = kernels.prepare(self._kernel, packed)
            self.weight = self._build.keep(spec.name, prepared)
            return
        operation = packed.format.linear
        self._packed = _Packed(
            kernels[operation],
            kernels.prepare(operation, packed),
            # An adapter takes what these would round.
            *(None if self._adapter else kernels.behind(operation, name) for name in _BEFORE),
        )

    def _place_bias(self) -> None:
        # Only one rank may add the bias of a row layer: the results are summed, here or by the
        # caller.
        if self.spec.parallel != "row" or self._build.tp_rank == 0:
            self.bias = self._build.zeros((self.spec.out_features,), self._dtype)
        for part, start in zip(self._parts, self._offsets(), strict=True):
            if not part.has_bias:
                continue
            self._build.weights.add(
                Placement(
                    name=f"{part.name}.bias",
                    shape=(part.out_features,),
                    region=(part.piece.of(part.out_features),),
                    accept=partial(self._accept_bias, start),
                )
            )
        if all(part.has_bias for part in self._parts):
            self._offer_fused("bias", ())

    def _accept_bias(self, start: int, tensor: Tensor) -> None:
        if self.bias is not None:
            self.bias[start : start + tensor.shape[0]] = tensor.to(self._dtype)

    def _offer_fused(self, suffix: str, rest: tuple[int, ...]) -> None:
        """A checkpoint may hold the parts joined: qkv_proj, gate_up_proj (Paddle: up_gate_proj)."""
        if len(self._parts) == 1:
            return
        fused, offset = [], 0
        for part in self._parts:
            fused.append(FusedPart(f"{part.name}.{suffix}", offset))
            offset += part.out_features
        for name in joined_names(self.spec.name):
            self._build.weights.add_fused(f"{name}.{suffix}", (offset, *rest), fused)

    def _place_stored(self, quantizer: Quantizer) -> None:
        """Announce the quantizer's own tensors, which the checkpoint holds."""
        is_row = self.spec.parallel == "row"
        parts = [
            StoredPart(part.name, part.rows, self._in_piece if is_row else part.piece)
            for part in self._parts
        ]
        groups = [parts] if self._joins else [[part] for part in parts]
        names = joined_names(self.spec.name) if len(groups) == 1 else []
        for number, group in enumerate(groups):
            done = partial(self._take, quantizer, number)
            StoredLayer(self._build, quantizer, self._products[number][0], group, done, names)


def joined_names(name: str) -> list[str]:
    """Prefixes under which a checkpoint may hold the joined parts (Paddle: up_gate_proj)."""
    if not name.endswith("gate_up_proj"):
        return [name]
    return [name, name.removesuffix("gate_up_proj") + "up_gate_proj"]
