"""Internal formats: how a quantized weight lies in memory between loading and the kernel that reads
it.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

FP8_BLOCK: Final = 128
INT4_OFFSET: Final = 8
INT8_BOUND: Final = 127.0
FP8_BOUND: Final = 448.0
# Below any scale that means something; keeps rows of zeros from dividing by zero.
TINY: Final = 1e-12
_INT4_FORMATS: Final = frozenset(("wint4", "wint4_zp", "w4a8", "w4a8_static"))


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One layout, and what it means.

    `dequantize(weight: PackedWeight)` gives [..., N, K] float32 as the product sees it.
    `activation(x, weight)`, where a format has one, gives x as the product sees it: rounded to the
    numbers that the format multiplies with (and rotated, where the weights are). So the product is
    activation(x) times dequantize(weight) transposed, by definition.
    """

    name: str
    summary: str
    tensors: Mapping[str, str]  # by name: shape, dtype and meaning
    dequantize: Callable[[PackedWeight], Tensor]
    activation: Callable[[Tensor, PackedWeight], Tensor] | None = None

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
        return self.format.dequantize(self)

    def activate(self, x: Tensor) -> Tensor:
        """x as the product sees it; x itself for formats that leave activations alone."""
        return x if self.format.activation is None else self.format.activation(x, self)

    def expert(self, index: int) -> PackedWeight:
        """One expert's matrix; shares memory."""
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, num_experts=0)


def pack_int4(values: Tensor) -> Tensor:
    """[..., K] uint8 below 16 to [..., ceil(K / 2)] uint8, the even position in the low nibble."""
    xp = namespace(values)
    count = values.shape[-1]
    if count % 2:
        column = xp.zeros([*values.shape[:-1], 1], dtype=xp.uint8, device=str(values.device))
        values = xp.cat((values, column), -1)
    pairs = values.reshape([*values.shape[:-1], (count + 1) // 2, 2])
    return xp.bitwise_or(pairs[..., 0], xp.left_shift(pairs[..., 1], 4))


def unpack_int4(packed: Tensor, count: int) -> Tensor:
    """The inverse of pack_int4: [..., count] uint8."""
    xp = namespace(packed)
    pairs = xp.stack((xp.bitwise_and(packed, 15), xp.right_shift(packed, 4)), -1)
    flat = pairs.reshape([*packed.shape[:-1], 2 * packed.shape[-1]])
    return flat[..., :count] if count < flat.shape[-1] else flat


def spread(scale: Tensor, count: int, group_size: int) -> Tensor:
    """[..., N, G] to [..., N, count] by group; [..., N, 1] stays as it is, it broadcasts."""
    if scale.shape[-1] == 1:
        return scale
    xp = namespace(scale)
    # To float32 first: not every library repeats half floats.
    return xp.repeat_interleave(scale.float(), group_size, -1)[..., :count]


def dequantize_integer(weight: PackedWeight) -> Tensor:
    """Formats wint8, wint4 (also with zero points) and the int8-activation formats."""
    stored, scale = weight.tensors["weight"], weight.tensors["scale"].float()
    count = weight.in_features
    zero = weight.tensors.get("zero")
    if weight.format.name in _INT4_FORMATS:
        numbers = unpack_int4(stored, count).float()
        offset = INT4_OFFSET
    else:
        numbers, offset = stored.float(), 0
    if zero is not None:
        numbers = numbers - spread(zero.float(), count, weight.group_size)
    elif offset:
        numbers = numbers - offset
    return numbers * spread(scale, count, weight.group_size)


def dequantize_fp8(weight: PackedWeight) -> Tensor:
    """Formats wfp8afp8 and wfp8afp8_static."""
    return weight.tensors["weight"].float() * weight.tensors["scale"].float()


def dequantize_block_fp8(weight: PackedWeight) -> Tensor:
    """Format block_fp8."""
    xp = namespace(weight.tensors["weight"])
    stored, scale = weight.tensors["weight"].float(), weight.tensors["scale"].float()
    rows, columns = stored.shape[-2:]
    dim = len(stored.shape) - 2
    wide = xp.repeat_interleave(xp.repeat_interleave(scale, FP8_BLOCK, dim), FP8_BLOCK, dim + 1)
    return stored * wide[..., :rows, :columns]


def activate_int8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] rounded to int8 times a scale: of the layer if it has one, else of the token."""
    wide = x.float()
    scale = weight.tensors.get("input_scale")
    if scale is None:
        scale = (wide.abs().amax(dim=-1, keepdim=True) / INT8_BOUND).clamp(TINY)
    return (wide / scale).round().clamp(-INT8_BOUND, INT8_BOUND) * scale


def round_fp8(x: Tensor) -> Tensor:
    """x rounded to float8_e4m3fn, still float32; what lies beyond is cut to the largest."""
    xp = namespace(x)
    return x.clamp(-FP8_BOUND, FP8_BOUND).to(xp.float8_e4m3fn).float()


def activate_fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] rounded to fp8 times a scale: of the layer where there is one, else of the token."""
    wide = x.float()
    scale = weight.tensors.get("input_scale")
    if scale is None:
        scale = (wide.abs().amax(dim=-1, keepdim=True) / FP8_BOUND).clamp(TINY)
    return round_fp8(wide / scale) * scale


def activate_block_fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] rounded to fp8 times a scale of each token and 128 inputs."""
    xp = namespace(x)
    wide = x.float()
    tokens, count = wide.shape
    padding = -count % FP8_BLOCK
    if padding:
        zeros = xp.zeros([tokens, padding], dtype=xp.float32, device=wide.device)
        wide = xp.cat((wide, zeros), 1)
    blocks = wide.reshape([tokens, (count + padding) // FP8_BLOCK, FP8_BLOCK])
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / FP8_BOUND).clamp(TINY)
    rounded = (round_fp8(blocks / scale) * scale).reshape([tokens, count + padding])
    return rounded[:, :count] if padding else rounded


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
        dequantize_integer,
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
        dequantize_integer,
        activate_int8,
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
        dequantize_fp8,
        activate_fp8,
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
    dequantize_block_fp8,
    activate_block_fp8,
)

_FP8_WEIGHTS = QuantFormat(
    "wfp8",
    "fp8 weights, one scale per output; activations stay as they are",
    MappingProxyType({"weight": "[N,K] float8_e4m3fn", "scale": "[N,1] float"}),
    dequantize_fp8,
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
