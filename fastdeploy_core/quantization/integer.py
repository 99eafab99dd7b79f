"""Drivers wint8, wint4, w8a8 and w4a8: integers with one scale per output or per group of inputs.

Checkpoint tensors: weight ([N, K] int8, or [N, ceil(K/2)] uint8 with the even input in the low
nibble and 8 added), weight_scale [N, G], and for static activations input_scale [1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_core.contracts.quantizer import ParameterSpec
from fastdeploy_core.errors import ConfigError

from .base import PackedQuantizer, check_group, group_size_of
from .rounding import quantize_int4, quantize_int8

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

# Standard deviation of a dummy weight, as --load-format dummy has it for full precision.
_DUMMY_STD: Final = 0.02
_INT8_STD: Final = 73.9
_INT4_STD: Final = 4.61


class IntegerQuantizer(PackedQuantizer):
    """What the four drivers share."""

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
        if self.is_static and not self._stored:
            raise ConfigError(
                f"{self.name}: static activation scales come from calibration; run: fastdeploy quantize "
                f"MODEL --method {self.name} --calibration FILE --output DIR, or use "
                "activation_scheme dynamic"
            )
        self.format = FORMATS[
            f"{'w' if self.quantizes_activations else 'wint'}{self.bits}"
            f"{'a8' if self.quantizes_activations else ''}{'_static' if self.is_static else ''}"
        ]

    def supports(self, layer: LayerSpec) -> bool:
        """As every driver; a layer whose inputs are not whole groups is refused by name."""
        if not super().supports(layer):
            return False
        check_group(layer, self.group_size, self.name)
        return True

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight, weight_scale, input_scale."""
        rows, count = layer.out_features, layer.in_features
        by_row = layer.parallel == "row"
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
        """Nearest numbers; int4 cuts each group where the squared error is least."""
        quantize = quantize_int8 if self.bits == 8 else quantize_int4
        numbers, scale = quantize(weight, self.group_size)
        return {"weight": numbers, "weight_scale": scale}

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """The checkpoint's layout is the internal one."""
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


def largest_scale(layer: LayerSpec, scale: Tensor) -> Tensor:
    """Static activation scales of joined parts: they share their input, so the largest holds for all.

    [1], or [parts, 1] of a joined layer, behind a dimension of experts where there are any; to [1] or
    [E, 1], float32.
    """
    lead = [layer.num_experts] if layer.num_experts else []
    return scale.float().reshape([*lead, -1]).amax(dim=-1, keepdim=True)


class WInt8(IntegerQuantizer):
    """8-bit weights, activations as they are."""

    name = "wint8"


class WInt4(IntegerQuantizer):
    """4-bit weights, activations as they are."""

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
