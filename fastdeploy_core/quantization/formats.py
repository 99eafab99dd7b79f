"""The meaning of the internal formats: dequantization, and activations as the products see them.

The reference definition of contracts/quant_formats.py in plain tensor code, on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.quant_formats import FP8_BLOCK
from fastdeploy_core.tensor import namespace

from .packing import unpack_int4

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

_INT4_FORMATS = frozenset(("wint4", "wint4_zp", "w4a8", "w4a8_static"))
INT4_OFFSET = 8
INT8_BOUND = 127.0
FP8_BOUND = 448.0
# Below every meaningful scale; prevents division by zero for rows of zeros.
TINY = 1e-12


def spread(scale: Tensor, count: int, group_size: int) -> Tensor:
    """[..., N, G] to [..., N, count] by group; [..., N, 1] stays as it is, because it
    broadcasts."""
    if scale.shape[-1] == 1:
        return scale
    xp = namespace(scale)
    # To float32 first, because not every library repeats half floats.
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
    """x [T, K] rounded to int8 times a scale: the layer's if it has one, else one per token."""
    wide = x.float()
    scale = weight.tensors.get("input_scale")
    if scale is None:
        scale = (wide.abs().amax(dim=-1, keepdim=True) / INT8_BOUND).clamp(TINY)
    return (wide / scale).round().clamp(-INT8_BOUND, INT8_BOUND) * scale


def round_fp8(x: Tensor) -> Tensor:
    """x rounded to float8_e4m3fn, still float32; larger magnitudes become the largest finite
    one."""
    xp = namespace(x)
    return x.clamp(-FP8_BOUND, FP8_BOUND).to(xp.float8_e4m3fn).float()


def activate_fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] rounded to fp8 times a scale: the layer's if it has one, else one per token."""
    wide = x.float()
    scale = weight.tensors.get("input_scale")
    if scale is None:
        scale = (wide.abs().amax(dim=-1, keepdim=True) / FP8_BOUND).clamp(TINY)
    return round_fp8(wide / scale) * scale


def activate_block_fp8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] rounded to fp8 times a scale per token and 128 inputs."""
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
