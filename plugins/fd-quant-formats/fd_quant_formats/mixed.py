"""Driver mix_quant: one method for experts, one for everything else (FastDeploy 2.x's keys).

    {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8"}

Each may be any installed quantizer; "" or "none" is full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.quantizer import (
    CalibratedQuantizer,
    PackingQuantizer,
    Quantizer,
    make_quantizer,
)
from fastdeploy_core.errors import ConfigError

from .hooks import driver_name

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.contracts.quantizer import (
        Calibration,
        FindQuantizer,
        LayerSpec,
        ParameterSpec,
    )
    from fastdeploy_core.tensor import Tensor

_KEYS = ("dense_quant_type", "moe_quant_type")


class MixedQuantizer:
    """Delegates to the driver of the layer's part."""

    name = "mix_quant"
    contract = CONTRACT
    is_composed: Literal[True] = True

    def __init__(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        kernels: KernelTable,
        quantizers: FindQuantizer,
    ) -> None:
        stored = bool(config.get("is_quantized", False))
        moe_stored = stored or bool(config.get("is_moe_quantized", False))
        self._config = config

        def part(key: str, is_stored: bool) -> Quantizer | None:
            own = _part_config(key, config, is_stored)
            if own is None:
                return None
            return make_quantizer(own["quantization"], own, device, kernels, quantizers)

        self._dense = part("dense_quant_type", stored)
        self._moe = part("moe_quant_type", moe_stored)

    def _of(self, layer: LayerSpec) -> Quantizer:
        driver = self._moe if layer.role == "experts" else self._dense
        if driver is None:
            raise ConfigError(f"mix_quant: {layer.name} stays in full precision")
        return driver

    def supports(self, layer: LayerSpec) -> bool:
        """Whether the part's driver supports the layer."""
        driver = self._moe if layer.role == "experts" else self._dense
        return driver is not None and driver.supports(layer)

    def joins(self, layer: LayerSpec) -> bool:
        """Delegates to the part's driver."""
        return self._of(layer).joins(layer)

    def is_stored(self, layer: LayerSpec) -> bool:
        """Experts may be stored while the rest is in full precision (is_moe_quantized)."""
        return self._of(layer).is_stored(layer)

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """Delegates to the part's driver."""
        return self._of(layer).parameters(layer)

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Delegates to the part's driver."""
        return self._of(layer).quantize(layer, weight)

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """Delegates to the part's driver."""
        return self._of(layer).prepare(layer, tensors)

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight | None:
        """Delegates to the part's driver."""
        driver = self._of(layer)
        return driver.packed(layer, tensors) if isinstance(driver, PackingQuantizer) else None

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Delegates to the part's driver."""
        return self._of(layer).apply(layer, prepared, x, bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """Delegates to the part's driver."""
        return self._of(layer).dequantize(layer, tensors)

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """Delegates to the part's driver."""
        driver = self._of(layer)
        return driver.calibration(layer) if isinstance(driver, CalibratedQuantizer) else "none"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """Delegates to the part's driver."""
        driver = self._of(layer)
        if not isinstance(driver, CalibratedQuantizer):
            return driver.quantize(layer, weight)
        return driver.quantize_calibrated(layer, weight, calibration)

    def checkpoint_config(self) -> dict[str, Any]:
        """The settings of both parts under the names they share."""
        found: dict[str, Any] = {}
        for driver in (self._dense, self._moe):
            if isinstance(driver, CalibratedQuantizer):
                found.update(driver.checkpoint_config())
        found.pop("quant_method", None)
        kept = {key: self._config.get(key) or "none" for key in _KEYS}
        scheme = {"activation_scheme": self._config.get("activation_scheme", "dynamic")}
        return {**found, **scheme, **kept, "quantization": self.name, "is_quantized": True}


def _part_config(key: str, config: Mapping[str, Any], is_stored: bool) -> dict[str, Any] | None:
    """What the part's driver is built from; None: that part stays in full precision."""
    method = driver_name(str(config.get(key) or ""), config)
    if method in ("", "none"):
        return None
    if method == MixedQuantizer.name:
        raise ConfigError(f"mix_quant: {key} is mix_quant itself; name a method, such as wint8")
    return {**config, "quantization": method, "is_quantized": is_stored}
