"""Driver wint2: checkpoints as ERNIE-4.5-300B-A47B-2Bits is published, and their like while
loading.

From a checkpoint: experts of layers up to moe_w4_quant_config.quant_end_layer in wint4, those after
it in CCQ (ccq.py), everything else in wint8, all under FastDeploy 2.x's tensor names. From a model
in full precision: experts in our own code tet2, everything else in wint8; "moe_quant_type": "ccq2"
makes experts in CCQ, slowly and for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.contracts.quantizer import (
    Calibration,
    LayerSpec,
    ParameterSpec,
    Quantizer,
    make_quantizer,
)
from fastdeploy_core.errors import ConfigError, UnsupportedModel

from .ccq import GROUP, TOGETHER, encode
from .formats import CCQ
from .scales import check_scale
from .trellis import Tet2

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import FindQuantizer
    from fastdeploy_core.tensor import Tensor

# What experts may be in: the published mix, our own code, or CCQ alone.
KINDS: Final = ("w4w2", "tet2", "ccq2")
_SCALE_ROWS: Final = 2 * GROUP  # inputs whose local scales share a byte
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_DUMMY_SCALE: Final = 0.02 / 18.5 / 8


class CcqQuantizer:
    """CCQ tensors: quant_weight, weight_scale, super_scales, code_scale, code_zp."""

    def __init__(self, device: DeviceBackend, kernels: KernelTable) -> None:
        self.xp, self._kernels = device.xp, kernels

    def check(self, layer: LayerSpec) -> None:
        """ConfigError where inputs are not whole groups of local scales."""
        if layer.in_features % _SCALE_ROWS:
            raise ConfigError(
                f"wint2: {layer.name} has {layer.in_features} inputs on this rank; expected a "
                "multiple "
                f"of {_SCALE_ROWS}, two groups of local scales; use fewer tensor-parallel ranks"
            )

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """As published, [inputs, outputs]."""
        rows, count = layer.out_features, layer.in_features
        dim = 0 if layer.parallel == "row" else 1
        whole = None if layer.parallel == "row" else 0
        return {
            "quant_weight": ParameterSpec((count // TOGETHER, rows), "uint8", dim),
            "weight_scale": ParameterSpec((count // _SCALE_ROWS, rows), "uint8", dim, 0x88),
            "super_scales": ParameterSpec((rows,), "bfloat16", whole, _DUMMY_SCALE),
            "code_scale": ParameterSpec((rows,), "float32", whole, 120.0),
            "code_zp": ParameterSpec((rows,), "float32", whole, 0.0),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Encode a weight [out, in] by trying."""
        xp = self.xp
        found = encode(np.array(xp.to_numpy(weight.float()), np.float32))
        tensors = {k: xp.to_device(xp.from_numpy(v), weight.device) for k, v in found.items()}
        tensors["quant_weight"] = tensors.pop("weight")
        tensors["super_scales"] = tensors["super_scales"].to(xp.bfloat16)
        return tensors

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """The published layout is the internal one."""
        for suffix in ("super_scales", "code_scale", "code_zp"):
            name, may_be_zero = f"{layer.name}.{suffix}", suffix == "code_zp"
            check_scale(self.xp, name, tensors[suffix], may_be_zero=may_be_zero)
        held = {
            "weight": tensors["quant_weight"],
            "scale": tensors["weight_scale"],
            "super_scale": tensors["super_scales"],
            "code_scale": tensors["code_scale"].float(),
            "code_zero": tensors["code_zp"].float(),
        }
        return PackedWeight(CCQ, layer.out_features, layer.in_features, held, layer.num_experts)


class Wint2:
    """Passes every question on to the driver of the layer's part and place."""

    name = "wint2"
    contract = (1, 0)

    is_composed: Literal[True] = True

    def __init__(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        kernels: KernelTable,
        quantizers: FindQuantizer,
    ) -> None:
        self._stored = bool(config.get("is_quantized", False))
        kind = str(config.get("moe_quant_type") or ("w4w2" if self._stored else "tet2"))
        if kind not in KINDS or (kind == "w4w2" and not self._stored):
            raise ConfigError(
                f"wint2: moe_quant_type {kind!r} is not possible "
                f"{'in a checkpoint' if self._stored else 'while loading'}; possible: tet2, ccq2"
                + (", w4w2" if self._stored else "")
            )
        self._kind = kind
        self._last_w4 = -1
        if kind == "w4w2":
            self._last_w4 = _last_layer(config)
        # The documented key is dense_quant_type; FastDeploy 2.x reads another and has this default.
        dense = str(config.get("dense_quant_type") or "wint8")
        options = {k: v for k, v in config.items() if k not in ("group_size", "quantization")}

        def inner(name: str) -> Quantizer:
            own = {**options, "quantization": name}
            return make_quantizer(name, own, device, kernels, quantizers)

        self._dense, self._w4 = inner(dense), inner("wint4")
        self._ccq = CcqQuantizer(device, kernels)
        self._tet = Tet2({**options, "quantization": "tet2"}, device, kernels)
        self._config, self._dense_name = config, dense

    def _of(self, layer: LayerSpec) -> Quantizer | None:
        """The driver of a layer; None for CCQ, which has no driver of its own."""
        if layer.role != "experts":
            return self._dense
        if self._kind == "tet2":
            return self._tet
        if self._kind == "ccq2":
            return None
        found = _LAYER.search(f".{layer.name}")
        if found is None:
            raise UnsupportedModel(
                f"wint2: experts {layer.name} have no layer number; the published format needs one"
            )
        return self._w4 if int(found.group(1)) <= self._last_w4 else None

    def supports(self, layer: LayerSpec) -> bool:
        """As the part's driver."""
        driver = self._of(layer)
        if driver is None:
            self._ccq.check(layer)
            return True
        return driver.supports(layer)

    def joins(self, layer: LayerSpec) -> bool:
        """As the part's driver."""
        driver = self._of(layer)
        return driver is None or driver.joins(layer)

    def is_stored(self, layer: LayerSpec) -> bool:
        """As the configuration says."""
        return self._stored

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """As the part's driver."""
        driver = self._of(layer)
        return self._ccq.parameters(layer) if driver is None else driver.parameters(layer)

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Full precision becomes wint8 and tet2, or CCQ."""
        driver = self._of(layer)
        return self._ccq.quantize(weight) if driver is None else driver.quantize(layer, weight)

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """As tet2 for experts."""
        return self._tet.calibration(layer) if self._of(layer) is self._tet else "none"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """As tet2 for experts."""
        if self._of(layer) is self._tet:
            return self._tet.quantize_calibrated(layer, weight, calibration)
        return self.quantize(layer, weight)

    def checkpoint_config(self) -> dict[str, Any]:
        """What config.json says about a checkpoint of ours."""
        return {
            "quantization": self.name,
            "is_quantized": True,
            "moe_quant_type": self._kind,
            "dense_quant_type": self._dense_name,
            "tensor_layout": "plain",
        }

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """As the part's driver."""
        driver = self._of(layer)
        return self._ccq.pack(layer, tensors) if driver is None else driver.prepare(layer, tensors)

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """As the part's driver; experts go to the MoE driver."""
        driver = self._of(layer)
        if driver is None:
            raise UnsupportedModel(f"wint2: {layer.name} is computed by the MoE driver")
        return driver.apply(layer, prepared, x, bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """As the part's driver."""
        driver = self._of(layer)
        if driver is None:
            return self._ccq.pack(layer, tensors).dequantize()
        return driver.dequantize(layer, tensors)


def _last_layer(config: Mapping[str, Any]) -> int:
    """quant_end_layer of the layers in wint4; FastDeploy 2.x's default is 6."""
    for key in ("moe_quant_config", "moe_w4_quant_config"):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"wint2: {key} of the quantization is {config!r:.80}; expected an object"
            )
    value = config.get("quant_end_layer", 6)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"wint2: moe_w4_quant_config.quant_end_layer is {value!r}; expected a layer number"
        )
    return value
