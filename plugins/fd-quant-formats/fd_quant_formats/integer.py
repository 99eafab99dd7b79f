"""Drivers wint8, wint4, w8a8 and w4a8: integers with one scale per output or per group of inputs.

Checkpoint tensors: weight ([N, K] int8, or [N, ceil(K/2)] uint8 with the even input in the low
nibble and 8 added), weight_scale [N, G], and for static activations input_scale [1]; config.json
then says "tensor_layout": "plain". Without that entry the checkpoint is FastDeploy 2.x's:
quant_weight in the layout of interleaved.py, weight_scale [N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.quant_formats import (
    FORMATS,
    INT8_BOUND,
    TINY,
    PackedWeight,
    pack_int4,
)
from fastdeploy_core.contracts.quantizer import Calibration, ParameterSpec
from fastdeploy_core.errors import ConfigError

from .base import CALIBRATING, PackedQuantizer, check_group, group_size_of, largest_scale
from .feedback import quantize_int4_with_feedback
from .interleaved import TILE, outputs_together, plain_rows
from .rounding import quantize_int4, quantize_int8

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

# Standard deviation of dummy weights, the same as --load-format dummy has in full precision.
_DUMMY_STD: Final = 0.02
_INT8_STD: Final = 73.9
_INT4_STD: Final = 4.61
PLAIN: Final = "plain"


class IntegerQuantizer(PackedQuantizer):
    """What the four drivers share."""

    contract = CONTRACT
    bits: ClassVar[int] = 8
    quantizes_activations: ClassVar[bool] = False

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        self.group_size = group_size_of(config)
        if self.quantizes_activations and self.group_size:
            raise ConfigError(
                f"{self.name}: group_size {self.group_size} is not possible with int8 activations; "
                "possible: 0 (one scale per output); groups are a feature of wint4 and wint8"
            )
        scheme = str(config.get("activation_scheme", "dynamic"))
        if scheme not in ("dynamic", "static"):
            raise ConfigError(
                f"{self.name}: activation_scheme {scheme!r} is unknown; possible: dynamic, static"
            )
        self.is_static = self.quantizes_activations and scheme == "static"
        if self.is_static and not (self._stored or config.get(CALIBRATING)):
            raise ConfigError(
                f"{self.name}: static activation scales come from calibration; run: fastdeploy "
                f"quantize MODEL --method {self.name} --calibration FILE --output DIR, or use "
                "activation_scheme dynamic"
            )
        # FastDeploy 2.x has one layout and does not name it.
        self.is_interleaved = self._stored and config.get("tensor_layout") != PLAIN
        if self.is_interleaved and (self.quantizes_activations or self.group_size):
            raise ConfigError(
                f"{self.name}: the checkpoint is not in the layout that `fastdeploy quantize` "
                "writes "
                f'("tensor_layout": "{PLAIN}"); of FastDeploy 2.x, wint8 and wint4 with one scale '
                "per output are read; quantize the original model with: fastdeploy quantize"
            )
        self.format = FORMATS[
            f"{'w' if self.quantizes_activations else 'wint'}{self.bits}"
            f"{'a8' if self.quantizes_activations else ''}{'_static' if self.is_static else ''}"
        ]

    def supports(self, layer: LayerSpec) -> bool:
        """As in PackedQuantizer; a layer whose inputs are not whole groups is refused by name."""
        if not super().supports(layer):
            return False
        check_group(layer, self.group_size, self.name)
        if self.is_interleaved:
            self._check_interleaved(layer)
        return True

    def _check_interleaved(self, layer: LayerSpec) -> None:
        together = outputs_together(self.bits)
        odd = [part for part in layer.parts if part.out_features % together]
        if layer.in_features % TILE or odd or (layer.parallel == "row" and layer.shards > 1):
            raise ConfigError(
                f"{self.name}: {layer.name} ({layer.in_features} inputs, {layer.out_features} "
                "outputs on this rank) cannot be cut out of FastDeploy 2.x's interleaved layout; "
                "expected inputs "
                f"in whole tiles of {TILE}, not divided among ranks, and outputs in groups of "
                f"{together}; use --tensor-parallel-size 1, or quantize the original model with: "
                "fastdeploy quantize"
            )

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight, weight_scale, input_scale."""
        rows, count = layer.out_features, layer.in_features
        by_row = layer.parallel == "row"
        if self.is_interleaved:
            scale = _DUMMY_STD / (_INT8_STD if self.bits == 8 else _INT4_STD)
            return {
                "quant_weight": ParameterSpec((rows * self.bits // 8, count), "int8", 0),
                "weight_scale": ParameterSpec((rows,), "float32", 0, scale),
            }
        groups = -(-count // self.group_size) if self.group_size else 1
        std = _INT8_STD if self.bits == 8 else _INT4_STD
        width, dtype = (count, "int8") if self.bits == 8 else (-(-count // 2), "uint8")
        scale_dim = (1 if groups > 1 else None) if by_row else 0
        found = {
            "weight": ParameterSpec((rows, width), dtype, 1 if by_row else 0),
            "weight_scale": ParameterSpec((rows, groups), "float32", scale_dim, _DUMMY_STD / std),
        }
        if self.is_static:
            found["input_scale"] = ParameterSpec((1,), "float32", None, 0.05)
        return found

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """To the nearest numbers; int4 clips each group where the squared error is least."""
        quantize = quantize_int8 if self.bits == 8 else quantize_int4
        numbers, scale = quantize(weight, self.group_size)
        return {"weight": numbers, "weight_scale": scale}

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """int4 is rounded with error feedback; static activations need their largest magnitude."""
        if self.bits == 4:
            return "hessian"
        return "peak" if self.is_static else "none"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """Like quantize(), with calibration; an expert without tokens is rounded without it."""
        if self.bits == 4 and calibration.hessian is not None and calibration.num_tokens:
            xp = self.xp
            host = np.array(xp.to_numpy(weight.float()))
            numbers, scale = quantize_int4_with_feedback(host, calibration.hessian, self.group_size)
            packed = pack_int4(self.device.to_device(numbers))
            found = {"weight": packed, "weight_scale": self.device.to_device(scale)}
        else:
            found = self.quantize(layer, weight)
        if self.is_static:
            peak = max(calibration.peak, TINY) / INT8_BOUND
            found["input_scale"] = self.device.to_device(np.array([peak], np.float32))
        return found

    def checkpoint_config(self) -> dict[str, Any]:
        """quantization_config of a checkpoint that `fastdeploy quantize` writes."""
        found: dict[str, Any] = {
            "quantization": self.name,
            "is_quantized": True,
            "tensor_layout": PLAIN,
        }
        if self.group_size:
            found["group_size"] = self.group_size
        if self.quantizes_activations:
            found["activation_scheme"] = "static" if self.is_static else "dynamic"
        return found

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """The checkpoint's layout is the internal one, except FastDeploy 2.x's."""
        if self.is_interleaved:
            rows = plain_rows(tensors["quant_weight"], self.bits, layer.in_features)
            if self.bits == 8:
                weight = (rows.to(self.xp.int32) - 128).to(self.xp.int8)
            else:
                weight = pack_int4(rows)
            packed = {"weight": weight, "scale": tensors["weight_scale"].unsqueeze(-1)}
        else:
            packed = {"weight": tensors["weight"], "scale": tensors["weight_scale"]}
        if self.is_static:
            packed["input_scale"] = largest_scale(layer, tensors["input_scale"])
        return PackedWeight(
            self.format,
            layer.out_features,
            layer.in_features,
            packed,
            layer.num_experts,
            self.group_size,
        )


class WInt8(IntegerQuantizer):
    """8-bit weights; activations are not rounded."""

    name = "wint8"


class WInt4(IntegerQuantizer):
    """4-bit weights; activations are not rounded."""

    name = "wint4"
    bits = 4


class W8A8(IntegerQuantizer):
    """8-bit weights and activations."""

    name = "w8a8"
    quantizes_activations = True


class W4A8(IntegerQuantizer):
    """4-bit weights, 8-bit activations."""

    name = "w4a8"
    bits = 4
    quantizes_activations = True
