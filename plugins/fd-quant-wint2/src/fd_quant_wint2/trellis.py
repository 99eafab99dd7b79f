"""Drivers tet2, tet3 and tet4: the trellis code of code.py, for experts and, if asked, linear
layers.

Checkpoint tensors: weight [ceil(N/64), K/8, 16 * bits] int32, weight_scale [N], weight_signs [K/8]
uint8 (a set bit is -1), weight_block [1] (inputs of one Hadamard transform). Options, in
quantization_config or as JSON after --quantization: "dense": true takes linear layers too, "seed"
chooses the signs, "hadamard_block_size" limits the transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.contracts.quantizer import Calibration, LayerSpec, ParameterSpec
from fastdeploy_core.errors import ConfigError, WeightError

from .code import TILE_COLUMNS, TILE_ROWS, words_per_strand
from .formats import TET
from .hadamard import MIN_BLOCK, block_size, random_signs, rotate, rotate_back, rotated_moments
from .ldlq import quantize_rows
from .scales import check_scale

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

_DUMMY_STD = 0.02


class TrellisQuantizer:
    """What the three widths share."""

    name = ""
    contract = (1, 0)
    bits: ClassVar[int] = 2

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.config, self.device, self.xp = config, device, device.xp
        self._kernels = kernels
        self._stored = bool(config.get("is_quantized", False))
        self._takes_dense = bool(config.get("dense", False))
        self._ignored = tuple(str(name) for name in config.get("modules_to_not_convert") or ())
        self._seed = _whole_number(config, "seed", 0)
        self._most = _whole_number(config, "hadamard_block_size", 0)
        if self._most and (self._most < MIN_BLOCK or self._most & (self._most - 1)):
            raise ConfigError(
                f"{self.name}: hadamard_block_size {self._most} is not possible; expected 0 or a "
                f"power of two from {MIN_BLOCK} on"
            )

    def supports(self, layer: LayerSpec) -> bool:
        """Experts, and linear layers where "dense" is set, if they can be cut into tiles."""
        if layer.role not in ("experts", "linear"):
            return False
        if layer.role == "linear" and not self._takes_dense:
            return False
        names = [part.name for part in layer.parts] or [layer.name]
        if any(f".{left}." in f".{name}." for left in self._ignored for name in names):
            return False
        if layer.in_features % MIN_BLOCK:
            return False
        rows = [layer.out_features] if not layer.parts else [p.out_features for p in layer.parts]
        divided = layer.parallel == "column" and layer.shards > 1
        return not any(r % TILE_ROWS for r in rows) or (len(rows) == 1 and not divided)

    def joins(self, layer: LayerSpec) -> bool:
        """Parts are whole tiles."""
        return True

    def is_stored(self, layer: LayerSpec) -> bool:
        """As the configuration says."""
        return self._stored

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """weight, weight_scale, weight_signs, weight_block."""
        tall = -(-layer.out_features // TILE_ROWS)
        wide = layer.in_features // TILE_COLUMNS
        by_row = layer.parallel == "row"
        block = block_size(layer.in_features * (layer.shards if by_row else 1), self._most)
        return {
            "weight": ParameterSpec(
                (tall, wide, words_per_strand(self.bits)), "int32", 1 if by_row else 0
            ),
            "weight_scale": ParameterSpec(
                (layer.out_features,), "float16", None if by_row else 0, _DUMMY_STD
            ),
            # Dummy parts share one rotation too: any byte, but the same everywhere.
            "weight_signs": ParameterSpec((wide,), "uint8", 0 if by_row else None, 0x5A),
            "weight_block": ParameterSpec((1,), "int32", None, float(block)),
        }

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Without calibration: every strand by itself."""
        return self._quantize(layer, weight, None)

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """Error feedback needs second moments."""
        return "hessian"

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """With error feedback, where there were tokens."""
        hessian = calibration.hessian if calibration.num_tokens else None
        return self._quantize(layer, weight, hessian)

    def checkpoint_config(self) -> dict[str, Any]:
        """What config.json says about a checkpoint of ours."""
        found: dict[str, Any] = {"quantization": self.name, "is_quantized": True}
        if self._takes_dense:
            found["dense"] = True
        return found

    def _quantize(
        self, layer: LayerSpec, weight: Tensor, hessian: np.ndarray | None
    ) -> dict[str, Tensor]:
        block = block_size(layer.in_features, self._most)
        signs = random_signs(layer.in_features, layer.name, self._seed)
        to_device = self.device.to_device
        rotated = rotate(weight.float(), to_device(signs.copy()), block)
        rows = np.array(self.xp.to_numpy(rotated), np.float32)
        if hessian is not None:
            hessian = rotated_moments(self.xp, hessian, signs, block)
        words, scale = quantize_rows(
            rows, self.bits, hessian, xp=self.xp, device=self.device.device
        )
        return {
            "weight": to_device(words),
            "weight_scale": to_device(scale),
            "weight_signs": to_device(np.packbits(signs < 0, bitorder="little")),
            "weight_block": to_device(np.array([block], np.int32)),
        }

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """Packed for the MoE driver, or with the kernel that will multiply it."""
        packed = self.pack(layer, tensors)
        if layer.role == "experts":
            return packed
        operation = packed.format.linear
        return self._kernels[operation], self._kernels.prepare(operation, packed)

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """Checked, the signs as numbers."""
        xp, count = self.xp, layer.in_features
        check_scale(xp, f"{layer.name}.weight_scale", tensors["weight_scale"])
        lead = [layer.num_experts] if layer.num_experts else []
        block = self._block(layer, tensors["weight_block"])
        bits = tensors["weight_signs"].reshape([*lead, -1, count // 8])
        # Joined parts have one rotation: they share their input.
        first = bits[..., 0, :]
        if not bool((bits == first.unsqueeze(-2)).all()):
            raise WeightError(
                f"tensors {layer.name}.weight_signs of joined parts differ; they share one input "
                "and need one rotation; quantize the model again"
            )
        shifts = xp.to_device(xp.from_numpy(np.arange(8, dtype=np.uint8)), first.device)
        spread = xp.bitwise_and(xp.right_shift(first.unsqueeze(-1), shifts), 1)
        signs = (1 - 2 * spread.to(xp.int32)).to(xp.int8).reshape([*lead, count])
        blocks = xp.full([*lead, 1], block, dtype=xp.int32, device=first.device)
        held = {
            "weight": tensors["weight"],
            "scale": tensors["weight_scale"],
            "signs": signs,
            "block": blocks,
        }
        return PackedWeight(TET[self.bits], layer.out_features, count, held, layer.num_experts)

    def _block(self, layer: LayerSpec, stored: Tensor) -> int:
        found = {int(n) for n in stored.reshape([-1]).tolist()}
        block = max(found, default=0)
        if len(found) != 1 or block < 1 or block & (block - 1) or layer.in_features % block:
            raise WeightError(
                f"tensor {layer.name}.weight_block says {sorted(found)}; expected one power of two "
                "that "
                f"divides the {layer.in_features} inputs of this rank; use fewer tensor-parallel "
                "ranks, or quantize with hadamard_block_size 128"
            )
        return block

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """The kernel's product."""
        product, weight = prepared
        y: Tensor = product(x, weight, bias)
        return y

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """[N, K] float32, rotated back."""
        packed = self.pack(layer, tensors)
        block = int(self.device.to_host(packed.tensors["block"])[0])
        return rotate_back(packed.dequantize(), packed.tensors["signs"], block)


def _whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"tet: {key} is {value!r}; expected a whole number, 0 or above")
    return value


class Tet2(TrellisQuantizer):
    """Two bits per weight."""

    name = "tet2"


class Tet3(TrellisQuantizer):
    """Three bits per weight."""

    name = "tet3"
    bits = 3


class Tet4(TrellisQuantizer):
    """Four bits per weight."""

    name = "tet4"
    bits = 4
