"""The kernels themselves, in plain tensor code. They are imported when a layer asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / rms(x) * weight, computed in float32, in the dtype of x."""
    xp = namespace(x)
    wide = x.float()
    scale = xp.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    result: Tensor = (wide * scale).to(x.dtype) * weight
    return result
