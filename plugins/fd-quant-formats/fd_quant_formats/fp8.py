"""Drivers block_wise_fp8 and wfp8afp8: float8_e4m3fn weights and activations.

block_wise_fp8 holds blocks of 128 x 128, as transformers' quant_method "fp8" with weight_block_size
stores them: weight, weight_scale_inv (a factor). wfp8afp8 holds one scale per output: weight,
weight_scale, and input_scale if activations are static; a scale per tensor in a checkpoint is
repeated for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.quant_formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BOUND,
    TINY,
    PackedWeight,
)
from fastdeploy_core.contracts.quantizer import Calibration, ParameterSpec
from fastdeploy_core.errors import ConfigError

from .base import CALIBRATING, PackedQuantizer, largest_scale, spread_parts
from .rounding import quantize_block_fp8, quantize_fp8

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

# Standard deviation of random fp8 bits below 2 in magnitude (loading/weights.py).
_DUMMY_SCALE = 0.02 / 0.63


class BlockFp8(PackedQuantizer):
    """Weights in blocks of 128 x 128, activations in blocks of 1 x 128."""

    name = "block_wise_fp8"
    contract = CONTRACT

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        block = config.get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
        if block not in ([FP8_BLOCK] * 2, (FP8_BLOCK,) * 2):
            raise ConfigError(
                f"{self.name}: weight_block_size {block!r} is not supported; possible: "
                f"[{FP8_BLOCK}, {FP8_BLOCK}]"
            )
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise ConfigError(
                f"{self.name}: activation_scheme {config['activation_scheme']!r} is not supported; "
                "possible: dynamic"
            )

    def supports(self, layer: LayerSpec) -> bool:
        """Layers that ranks or joined experts would cut inside a block are refused by name."""
        if not super().supports(layer):
            return False
        cut = layer.in_features if layer.parallel == "row" and layer.shards > 1 else 0
        if layer.role == "experts" and len(layer.parts) > 1:
            cut = layer.parts[0].out_features
        if cut % FP8_BLOCK:
            raise ConfigError(
                f"{self.name}: {layer.name} is cut into pieces of {cut}, inside a block of "
                f"{FP8_BLOCK}; use fewer tensor-parallel ranks, or wfp8afp8, which has no blocks"
            )
        return True

    def joins(self, layer: LayerSpec) -> bool:
        """Whether every part but the last ends at a block's edge."""
        return all(part.out_features % FP8_BLOCK == 0 for part in layer.parts[:-1])

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight, weight_scale_inv."""
        rows, count = layer.out_features, layer.in_features
        blocks = (-(-rows // FP8_BLOCK), -(-count // FP8_BLOCK))
        dim = 1 if layer.parallel == "row" else 0
        return {
            "weight": ParameterSpec((rows, count), "float8_e4m3fn", dim),
            "weight_scale_inv": ParameterSpec(blocks, "float32", dim, _DUMMY_SCALE),
        }

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """By the largest magnitude of each block."""
        numbers, scale = quantize_block_fp8(weight)
        return {"weight": numbers, "weight_scale_inv": scale}

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """Nothing: scales of activations are computed at run time."""
        return "none"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """Same as quantize()."""
        return self.quantize(layer, weight)

    def checkpoint_config(self) -> dict[str, Any]:
        """In the form of transformers, so that others can read it."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """The checkpoint's layout is the internal one."""
        packed = {"weight": tensors["weight"], "scale": tensors["weight_scale_inv"].float()}
        return PackedWeight(
            FORMATS["block_fp8"], layer.out_features, layer.in_features, packed, layer.num_experts
        )


class WFp8AFp8(PackedQuantizer):
    """One scale per output; activations have one per token, or one per layer from calibration."""

    name = "wfp8afp8"
    contract = CONTRACT

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        scheme = str(config.get("activation_scheme", "dynamic"))
        if scheme not in ("dynamic", "static"):
            raise ConfigError(
                f"{self.name}: activation_scheme {scheme!r} is unknown; possible: dynamic, static"
            )
        self.is_static = scheme == "static"
        if self.is_static and not (self._stored or config.get(CALIBRATING)):
            raise ConfigError(
                f"{self.name}: static activation scales come from calibration; run: fastdeploy "
                f"quantize MODEL --method {self.name} --calibration FILE --output DIR, or use "
                "activation_scheme dynamic"
            )
        # transformers and vLLM store one scale per tensor unless the configuration says otherwise.
        given = "tensor" if config.get("quant_method") == "fp8" else "channel"
        if config.get("quantization") == "tensor_wise_fp8":
            given = "tensor"
        self.per_tensor = self._stored and str(config.get("weight_scheme", given)) == "tensor"
        self.format = FORMATS["wfp8afp8_static" if self.is_static else "wfp8afp8"]

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight, weight_scale, input_scale."""
        rows, count = layer.out_features, layer.in_features
        by_row = layer.parallel == "row"
        scale, dim = ((rows, 1), None if by_row else 0)
        if self.per_tensor:
            scale, dim = (1, 1), None
        found = {
            "weight": ParameterSpec((rows, count), "float8_e4m3fn", 1 if by_row else 0),
            "weight_scale": ParameterSpec(scale, "float32", dim, _DUMMY_SCALE),
        }
        if self.is_static:
            found["input_scale"] = ParameterSpec((1,), "float32", None, 0.05)
        return found

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """By the largest magnitude of each output."""
        numbers, scale = quantize_fp8(weight)
        return {"weight": numbers, "weight_scale": scale}

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """Static activations need their largest magnitude."""
        return "peak" if self.is_static else "none"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """Like quantize(), plus the scale of the inputs."""
        found = self.quantize(layer, weight)
        if self.is_static:
            peak = max(calibration.peak, TINY) / FP8_BOUND
            found["input_scale"] = self.device.to_device(np.array([peak], np.float32))
        return found

    def checkpoint_config(self) -> dict[str, Any]:
        """quantization_config of a checkpoint that `fastdeploy quantize` writes."""
        return {
            "quantization": self.name,
            "is_quantized": True,
            "weight_scheme": "channel",
            "activation_scheme": "static" if self.is_static else "dynamic",
        }

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """Scales of whole tensors are repeated for each output."""
        scale = tensors["weight_scale"].float()
        if self.per_tensor:
            scale = spread_parts(self.xp, layer, scale)
        packed = {"weight": tensors["weight"], "scale": scale}
        if self.is_static:
            packed["input_scale"] = largest_scale(layer, tensors["input_scale"])
        return PackedWeight(
            self.format, layer.out_features, layer.in_features, packed, layer.num_experts
        )
