"""MXFP4 experts of checkpoints (OCP Microscaling Formats 1.0): for devices that multiply with them,
and read in the model's dtype for the others.

Of a matrix [experts, outputs, inputs] there are `blocks` uint8 [experts, outputs, inputs / 32, 16],
two E2M1 numbers a byte, the low nibble first, and `scales` uint8 [experts, outputs, inputs / 32],
a factor of 2 ** (scale - 127) for 32 inputs. The internal format is the same with the
bytes of a row one after the other.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.contracts.quant_formats import PackedWeight, QuantFormat, unpack_int4
from fastdeploy_core.contracts.quantizer import ParameterSpec
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.tensor import namespace

from .base import PackedQuantizer

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

GROUP: Final = 32
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS: Final = (*_POSITIVE, *(-level for level in _POSITIVE))
_NOT_A_NUMBER: Final = 255


def _dequantize(weight: PackedWeight) -> Tensor:
    """[..., outputs, inputs] float32."""
    stored, scales = weight.tensors["weight"], weight.tensors["scale"]
    xp, device = namespace(stored), str(stored.device)
    factors = np.ldexp(np.ones(_NOT_A_NUMBER + 1, np.float64), np.arange(_NOT_A_NUMBER + 1) - 127)
    factors[_NOT_A_NUMBER] = np.nan
    tables = (np.array(_LEVELS, np.float32), factors.astype(np.float32))
    levels, factor = (xp.to_device(xp.from_numpy(table), device) for table in tables)
    codes = unpack_int4(stored, weight.in_features).reshape([-1]).to(xp.int64)
    values = xp.index_select(levels, 0, codes).reshape([-1, GROUP])
    values = values * xp.index_select(factor, 0, scales.reshape([-1]).to(xp.int64)).unsqueeze(1)
    return values.reshape([*scales.shape[:-1], weight.in_features])


FORMAT: Final = QuantFormat(
    "mxfp4",
    "E2M1 weights, 32 inputs share a power of two; activations stay as they are",
    MappingProxyType(
        {
            "weight": "[N,K/2] uint8, low nibble first: a sign, 2 bits exponent, 1 bit mantissa",
            "scale": "[N,K/32] uint8: times 2 ** (scale - 127)",
        }
    ),
    _dequantize,
)


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
        """The packed weight: experts alone are taken."""
        return self.packed(layer, tensors)

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """Of all experts, or of one whose tensors have no expert dimension."""
        blocks, scales = tensors["blocks"], tensors["scales"]
        if bool((scales.to(self.xp.int64) == _NOT_A_NUMBER).any()):
            raise WeightError(
                f"tensor {layer.name}_scales holds a scale that is not a number; the quantized "
                "checkpoint is damaged; download it again"
            )
        experts = layer.num_experts if scales.ndim == 3 else 0
        stored = blocks.reshape([*blocks.shape[:-2], layer.in_features // 2])
        held = {"weight": stored, "scale": scales}
        sizes = layer.out_features, layer.in_features
        return PackedWeight(FORMAT, *sizes, held, experts, GROUP, layer.dtype)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """[..., outputs, inputs] float32, of any leading dimensions."""
        return self.packed(layer, tensors).dequantize()
