"""What scales in a checkpoint have to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import WeightError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


def check_scale(xp: Any, name: str, scale: Tensor, *, may_be_zero: bool = False) -> None:
    """WeightError unless all are finite numbers, other than zero if they may not be."""
    wide = scale.float()
    wrong = ~xp.isfinite(wide)
    if not may_be_zero:
        wrong = wrong | (wide == 0)
    if bool(wrong.any()):
        raise WeightError(
            f"tensor {name} holds a scale that is zero or not a finite number; the quantized "
            "checkpoint is damaged; download it or quantize the model again"
        )
