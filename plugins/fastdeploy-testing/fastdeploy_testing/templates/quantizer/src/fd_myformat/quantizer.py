"""The format: w is scale * n, with n a signed integer of `bits` bits and one scale per output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_core.contracts.device import DeviceBackend
from fastdeploy_core.contracts.ops import KernelTable
from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import Tensor


class MyFormatQuantizer:
    """One object per model."""

    name = "myformat"
    contract = (0, 2)

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self._xp, self._linear = device.xp, kernels["linear"]
        self._is_stored = bool(config.get("is_quantized", False))
        self.bits = config.get("bits", 8)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ConfigError(f"myformat: bits is {self.bits!r}; possible: 2 to 8")

    def supports(self, layer: LayerSpec) -> bool:
        return layer.role == "linear"

    def joins(self, layer: LayerSpec) -> bool:
        return True

    def is_stored(self, layer: LayerSpec) -> bool:
        return self._is_stored

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """A layer divided by inputs ("row") is cut in the last dimension; its scales are not."""
        by_row, shape = layer.parallel == "row", (layer.out_features, layer.in_features)
        return {
            "weight": ParameterSpec(shape, "int8", 1 if by_row else 0),
            "weight_scale": ParameterSpec(shape[:1], "float32", None if by_row else 0, 1e-3),
        }

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """weight [out, in] of any floating dtype."""
        wide, most = weight.float(), float(2 ** (self.bits - 1) - 1)
        scale = (wide.abs().amax(dim=-1) / most).clamp(1e-12)
        numbers = (wide / scale.unsqueeze(-1)).round().clamp(-most, most)
        return {"weight": numbers.to(self._xp.int8), "weight_scale": scale}

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def apply(
        self, layer: LayerSpec, prepared: dict[str, Tensor], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self._linear(x, self.dequantize(layer, prepared).to(x.dtype), bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].unsqueeze(-1)
