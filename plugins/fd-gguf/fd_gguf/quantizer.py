"""Driver gguf: matrices of a GGUF file whose format is an internal format (Q8_0, Q4_0).

They stay packed if the device has a kernel for them. Otherwise they are decoded while loading,
because the reference operation would decode them in every step. `--quantization gguf` keeps them
packed on any device. All other formats are decoded before a quantizer is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from fastdeploy_core.contracts.quant_formats import FORMATS
from fastdeploy_core.contracts.quantizer import make_quantizer
from fastdeploy_core.errors import ConfigError

from .settings import METHOD, PACKED, expert_free

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.contracts.quantizer import (
        FindQuantizer,
        LayerSpec,
        PackingQuantizer,
        ParameterSpec,
    )
    from fastdeploy_core.tensor import Tensor

GROUP_SIZE: Final = 32
_CORE: Final = "fastdeploy-core"


class GGUFQuantizer:
    """Delegates to the driver of the layer's format."""

    name = METHOD
    contract = (1, 0)
    is_composed: Literal[True] = True

    def __init__(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        kernels: KernelTable,
        quantizers: FindQuantizer,
    ) -> None:
        self._matrices: Mapping[str, str] = config.get("matrices") or {}
        self._is_kept = bool(config.get("is_kept", False))
        self._rounds_head = bool(config.get("rounds_head", False))
        self._origins = kernels.origins()
        own = {
            "group_size": GROUP_SIZE,
            "is_quantized": True,
            "tensor_layout": "plain",
            "lm_head": True,
        }
        self._drivers: dict[str, PackingQuantizer] = {
            kind: cast("PackingQuantizer", make_quantizer(kind, own, device, kernels, quantizers))
            for kind in PACKED.values()
        }

    def _formats(self, layer: LayerSpec) -> set[str]:
        names = [part.name for part in layer.parts] or [layer.name]
        if layer.role == "experts":
            # A MoE driver takes both matrices of an expert in one format.
            prefix = expert_free(names[0]).rpartition(".")[0]
            names = [f"{prefix}.{half}" for half in ("gate_proj", "up_proj", "down_proj")]
        return {self._matrices.get(name, "") for name in names}

    def _driver(self, layer: LayerSpec) -> PackingQuantizer:
        (found,) = self._formats(layer)
        return self._drivers[found]

    def supports(self, layer: LayerSpec) -> bool:
        """Layers whose matrices are all packed alike, if the device has a kernel for the format.
        Also a head that shares a token table of few bits, which the device may round to int8."""
        if self._is_shared_head(layer):
            return True
        formats = self._formats(layer)
        # A rank holds whole groups, and more than one: one group would look like one scale for all
        # ranks.
        is_cut = layer.in_features % GROUP_SIZE or (
            layer.shards > 1 and layer.in_features == GROUP_SIZE
        )
        if len(formats) != 1 or is_cut or layer.role == "embedding":
            return False
        (found,) = formats
        if found not in self._drivers:
            return False
        packed = FORMATS[found]
        operation = packed.experts if layer.role == "experts" else packed.linear
        is_own = self._origins.get(operation, _CORE) != _CORE
        return (self._is_kept or is_own) and self._drivers[found].supports(layer)

    def joins(self, layer: LayerSpec) -> bool:
        """Whether parts become one tensor."""
        return True

    def _is_shared_head(self, layer: LayerSpec) -> bool:
        return layer.role == "lm_head" and self._rounds_head

    def is_stored(self, layer: LayerSpec) -> bool:
        """True, except for a shared head: only stored layers are supported."""
        return not self._is_shared_head(layer)

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight and weight_scale."""
        return self._driver(layer).parameters(layer)

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Nothing is quantized here."""
        raise ConfigError(
            f"--quantization {self.name} keeps the numbers of a GGUF file; possible for "
            f"{layer.name} of another checkpoint: wint8, wint4, w8a8, w4a8"
        )

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """Delegates to the format's driver, which is kept for apply()."""
        driver = self._driver(layer)
        prepared = driver.prepare(layer, tensors)
        return prepared if layer.role == "experts" else (driver, prepared)

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight | None:
        """Delegates to the format's driver."""
        return self._driver(layer).packed(layer, tensors)

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Delegates to the format's driver."""
        driver, inner = prepared
        y: Tensor = driver.apply(layer, inner, x, bias)
        return y

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """Delegates to the format's driver."""
        return self._driver(layer).dequantize(layer, tensors)
