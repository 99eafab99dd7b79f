"""Internal formats: how a quantized weight lies in memory between loading and the kernel that reads it.

Every quantizer, whatever checkpoint it reads, ends in one of these records. Kernels are keyed by
them: format "wint4" is multiplied by operation "linear_wint4" and, for experts,
"moe_experts_wint4". A device fills the cells it has; what it lacks is served by the reference,
which dequantizes (`PackedWeight.dequantize`) and says so. A plugin with a format of its own makes
its own QuantFormat and registers reference cells for it in a table under device name "cpu".

Words used below: N outputs, K inputs, g inputs that share a scale (K where nothing is said), G =
ceil(K / g). Experts add a first dimension [E] to every tensor. `float` is float32, float16 or
bfloat16. int4 pairs lie low nibble first; with odd K the last high nibble is unused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

_ROOM = "fastdeploy_core.quantization"
FP8_BLOCK: Final = 128


def _load(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One layout. Targets are "module:function", imported when first used.

    `dequantize(weight: PackedWeight)` gives [..., N, K] float32 as the product sees it.
    `activation(x, weight)`, where a format has one, gives x as the product sees it: rounded to the
    numbers that the format multiplies with (and rotated, where the weights are). So the product is
    activation(x) times dequantize(weight) transposed, by definition.
    """

    name: str
    summary: str
    tensors: Mapping[str, str]  # by name: shape, dtype and meaning
    dequantize: str
    activation: str = ""

    @property
    def linear(self) -> str:
        """The operation of a linear layer: (x [T,K], PackedWeight, bias [N] | None) -> [T,N]."""
        return f"linear_{self.name}"

    @property
    def experts(self) -> str:
        """The operation of experts: moe_experts with PackedWeights for gate_up and down."""
        return f"moe_experts_{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [N, K], or one for each expert, in an internal format. What kernels are handed."""

    format: QuantFormat
    out_features: int
    in_features: int
    tensors: Mapping[str, Tensor]
    num_experts: int = 0  # 0: one matrix, no expert dimension
    group_size: int = 0  # inputs that share a scale; 0: all of them
    dtype: str = ""  # of the activations around it; empty: any

    def dequantize(self) -> Tensor:
        """[N, K] or [E, N, K] float32, as the product sees it."""
        return _load(self.format.dequantize)(self)

    def activate(self, x: Tensor) -> Tensor:
        """x as the product sees it; x itself for formats that leave activations alone."""
        return _load(self.format.activation)(x, self) if self.format.activation else x

    def expert(self, index: int) -> PackedWeight:
        """One expert's matrix; shares memory."""
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, num_experts=0)


def _weight_only(bits: int, *, zero: bool) -> QuantFormat:
    name = f"wint{bits}" + ("_zp" if zero else "")
    width, dtype = ("K", "int8") if bits == 8 else ("ceil(K/2)", "uint8")
    offset = {8: 0, 4: 8}[bits]
    tensors = {"weight": f"[N,{width}] {dtype}", "scale": "[N,G] float"}
    meaning = f"(q - {offset}) * scale" if offset else "q * scale"
    if zero:
        tensors["weight"] = f"[N,{width}] uint8"
        tensors["zero"] = "[N,G] uint8"
        meaning = "(q - zero) * scale"
    return QuantFormat(
        name,
        f"{bits}-bit weights, {meaning}; activations stay as they are",
        MappingProxyType(tensors),
        f"{_ROOM}.formats:dequantize_integer",
    )


def _int8_activations(bits: int, *, static: bool) -> QuantFormat:
    name = f"w{bits}a8" + ("_static" if static else "")
    tensors = {
        "weight": "[N,K] int8" if bits == 8 else "[N,ceil(K/2)] uint8",
        "scale": "[N,1] float",
    }
    how = "per token, absmax / 127"
    if static:
        tensors["input_scale"] = "[1] float32: x is round(x / input_scale), cut to +-127"
        how = "by input_scale"
    return QuantFormat(
        name,
        f"{bits}-bit weights as in wint{bits}, one scale per output; activations int8 {how}",
        MappingProxyType(tensors),
        f"{_ROOM}.formats:dequantize_integer",
        f"{_ROOM}.formats:activate_int8",
    )


def _fp8(*, static: bool) -> QuantFormat:
    tensors = {"weight": "[N,K] float8_e4m3fn", "scale": "[N,1] float"}
    how = "per token, absmax / 448"
    if static:
        tensors["input_scale"] = "[1] float32"
        how = "by input_scale"
    return QuantFormat(
        "wfp8afp8" + ("_static" if static else ""),
        f"fp8 weights, one scale per output; activations fp8 {how}",
        MappingProxyType(tensors),
        f"{_ROOM}.formats:dequantize_fp8",
        f"{_ROOM}.formats:activate_fp8",
    )


_BLOCK_FP8 = QuantFormat(
    "block_fp8",
    "fp8 weights in blocks of 128 x 128; activations fp8 per token and 128 inputs, absmax / 448",
    MappingProxyType(
        {
            "weight": "[N,K] float8_e4m3fn",
            "scale": f"[ceil(N/{FP8_BLOCK}),ceil(K/{FP8_BLOCK})] float32, multiplies",
        }
    ),
    f"{_ROOM}.formats:dequantize_block_fp8",
    f"{_ROOM}.formats:activate_block_fp8",
)

_FP8_WEIGHTS = QuantFormat(
    "wfp8",
    "fp8 weights, one scale per output; activations stay as they are",
    MappingProxyType({"weight": "[N,K] float8_e4m3fn", "scale": "[N,1] float"}),
    f"{_ROOM}.formats:dequantize_fp8",
)

FORMATS: Final[Mapping[str, QuantFormat]] = MappingProxyType(
    {
        f.name: f
        for f in (
            _weight_only(8, zero=False),
            _weight_only(8, zero=True),
            _weight_only(4, zero=False),
            _weight_only(4, zero=True),
            _int8_activations(8, static=False),
            _int8_activations(8, static=True),
            _int8_activations(4, static=False),
            _int8_activations(4, static=True),
            _BLOCK_FP8,
            _FP8_WEIGHTS,
            _fp8(static=False),
            _fp8(static=True),
        )
    }
)

FORMAT_OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{f.linear: f"(x [T,K], weight: PackedWeight, bias [N] | None) -> [T,N]; {f.summary}"
           for f in FORMATS.values()},
        **{f.experts: "(x [T,H], topk_ids [T,k], topk_weights [T,k], gate_up: PackedWeight, "
           f"down: PackedWeight) -> [T,H]; both of format {f.name}"
           for f in FORMATS.values()},
    }
)  # fmt: skip
