"""Driver mix_quant: one method for experts, one for everything else (FastDeploy 2.x's keys).

{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.errors import ConfigError

from .fp8 import BlockFp8, WFp8AFp8
from .integer import W4A8, W8A8, WInt4, WInt8

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec
    from fastdeploy_core.tensor import Tensor

    from .base import PackedQuantizer

METHODS: dict[str, type[PackedQuantizer]] = {
    driver.name: driver for driver in (WInt8, WInt4, W8A8, W4A8, BlockFp8, WFp8AFp8)
}
"""What may stand behind dense_quant_type and moe_quant_type; "" is full precision."""


class MixedQuantizer:
    """Passes every question on to the driver of the layer's part."""

    name = "mix_quant"
    contract = CONTRACT

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        stored = bool(config.get("is_quantized", False))
        moe_stored = stored or bool(config.get("is_moe_quantized", False))
        self._dense = _driver("dense_quant_type", config, stored, device, kernels)
        self._moe = _driver("moe_quant_type", config, moe_stored, device, kernels)

    def _of(self, layer: LayerSpec) -> PackedQuantizer:
        driver = self._moe if layer.role == "experts" else self._dense
        if driver is None:
            raise ConfigError(f"mix_quant: {layer.name} stays in full precision")
        return driver

    def supports(self, layer: LayerSpec) -> bool:
        """Where the part's method does."""
        driver = self._moe if layer.role == "experts" else self._dense
        return driver is not None and driver.supports(layer)

    def joins(self, layer: LayerSpec) -> bool:
        """As the part's driver."""
        return self._of(layer).joins(layer)

    def is_stored(self, layer: LayerSpec) -> bool:
        """Experts may be stored while the rest is in full precision (is_moe_quantized)."""
        return self._of(layer).is_stored(layer)

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """As the part's driver."""
        return self._of(layer).parameters(layer)

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """As the part's driver."""
        return self._of(layer).quantize(layer, weight)

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """As the part's driver."""
        return self._of(layer).prepare(layer, tensors)

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """As the part's driver."""
        return self._of(layer).apply(layer, prepared, x, bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """As the part's driver."""
        return self._of(layer).dequantize(layer, tensors)


def _driver(
    key: str, config: Mapping[str, Any], stored: bool, device: DeviceBackend, kernels: KernelTable
) -> PackedQuantizer | None:
    method = config.get(key)
    if method in (None, "", "none"):
        return None
    if method not in METHODS:
        raise ConfigError(
            f"mix_quant: {key} {method!r} is unknown; possible: {', '.join(METHODS)}, none"
        )
    own = {**config, "quantization": method, "is_quantized": stored}
    own.pop("quant_method", None)
    if method in ("w8a8", "w4a8", "wfp8afp8"):
        # Scales of activations are in checkpoints of this kind unless they say otherwise.
        own.setdefault("activation_scheme", "static" if stored and method == "w4a8" else "dynamic")
    return METHODS[method](own, device, kernels)
