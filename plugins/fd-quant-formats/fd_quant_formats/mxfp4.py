"""MXFP4 experts of checkpoints (OCP Microscaling Formats 1.0): read, and computed in the model's
dtype.

Of a matrix [experts, outputs, inputs] there are `blocks` uint8 [experts, outputs, inputs / 32, 16],
two E2M1 numbers a byte, the low nibble first, and `scales` uint8 [experts, outputs, inputs / 32],
a factor of 2 ** (scale - 127) for 32 inputs. No device has products with it yet, so a family reads
its experts with `dequantize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.contracts.quantizer import ParameterSpec
from fastdeploy_core.errors import CapabilityError, ConfigError, WeightError

from .base import PackedQuantizer

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

GROUP: Final = 32
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS: Final = (*_POSITIVE, *(-level for level in _POSITIVE))
_NOT_A_NUMBER: Final = 255


class Mxfp4(PackedQuantizer):
    """Takes all experts of a block together and nothing else."""

    name = "mxfp4"
    contract = (1, 2)

    def supports(self, layer: LayerSpec) -> bool:
        """A matrix of all experts of a block, if this rank's inputs are whole groups."""
        if layer.role != "experts" or not layer.num_experts:
            return False
        if layer.in_features % GROUP:
            raise ConfigError(
                f"mxfp4: {layer.name} has {layer.in_features} inputs on this rank; possible: "
                f"multiples of {GROUP}, with another --tensor-parallel-size"
            )
        return True

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """Blocks and scales."""
        shape = (layer.num_experts, layer.out_features, layer.in_features // GROUP)
        divided = {"column": 1, "row": 2}.get(layer.parallel)
        return {
            "blocks": ParameterSpec((*shape, GROUP // 2), "uint8", divided),
            "scales": ParameterSpec(shape, "uint8", divided, dummy=127),
        }

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """There is no product to prepare for."""
        raise CapabilityError(
            f"no device multiplies with mxfp4 ({layer.name}); possible: dequantize, in the model's "
            "dtype"
        )

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> None:
        """There is no internal format."""

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """[..., outputs, inputs] float32, of any leading dimensions."""
        xp, blocks, scales = self.xp, tensors["blocks"], tensors["scales"]
        wide, exponents = blocks.to(xp.int64), scales.to(xp.int64)
        if bool((exponents == _NOT_A_NUMBER).any()):
            raise WeightError(
                f"tensor {layer.name}_scales holds a scale that is not a number; the quantized "
                "checkpoint is damaged; download it again"
            )
        codes = xp.stack((wide % 16, wide // 16), -1).reshape([-1])
        factors = np.ldexp(np.ones(_NOT_A_NUMBER, np.float32), np.arange(_NOT_A_NUMBER) - 127)
        levels = self.device.to_device(np.array(_LEVELS, np.float32))
        factor = self.device.to_device(factors.astype(np.float32))
        values = xp.index_select(levels, 0, codes).reshape([-1, GROUP])
        values = values * xp.index_select(factor, 0, exponents.reshape([-1])).unsqueeze(1)
        lead = list(scales.shape[:-1])
        return values.reshape([*lead, int(scales.shape[-1]) * GROUP])
