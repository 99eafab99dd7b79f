"""What quantizer drivers share: which layers they take, checks, and passing weights to the kernel
table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError, WeightError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec
    from fastdeploy_core.tensor import Tensor

# Set by `fastdeploy quantize` only: scales of activations will be measured.
CALIBRATING = "is_calibrating"
_IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers")


class PackedQuantizer:
    """A driver whose layers are PackedWeights. Subclasses name themselves and the contract that
    they were written for, and define what is stored and how it is packed."""

    name = ""
    contract: tuple[int, int]

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        self.config, self.device, self.xp = config, device, device.xp
        self._kernels = kernels
        self._stored = bool(config.get("is_quantized", False))
        self._ignored = tuple(name for key in _IGNORE_KEYS for name in names_in(config, key))
        self._quantizes_head = config.get("lm_head") or False
        if not isinstance(self._quantizes_head, bool):
            raise ConfigError(
                f"lm_head of the quantization is {self._quantizes_head!r}; possible: true, false"
            )

    # -- for subclasses ---------------------------------------------------------------------------

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """From checkpoint tensors to the internal format."""
        raise NotImplementedError

    def is_ignored(self, name: str) -> bool:
        """Whether the configuration leaves a checkpoint matrix of this name in full precision."""
        dotted = f".{name}."
        return any(f".{entry}." in dotted for entry in self._ignored)

    # -- Quantizer --------------------------------------------------------------------------------

    def supports(self, layer: LayerSpec) -> bool:
        """Linear layers and experts; the lm head where the configuration says so; never
        embeddings."""
        if layer.role == "embedding" or (layer.role == "lm_head" and not self._quantizes_head):
            return False
        names = [part.name for part in layer.parts] or [layer.name]
        ignored = [name for name in names if self.is_ignored(name)]
        if ignored and len(ignored) < len(names):
            raise ConfigError(
                f"quantization_config leaves {', '.join(ignored)} in full precision but not "
                f"{', '.join(n for n in names if n not in ignored)}; these are computed as one "
                f"layer ({layer.name}); leave all of them out, or none"
            )
        return not ignored

    def joins(self, layer: LayerSpec) -> bool:
        """Whether parts become one tensor."""
        return True

    def is_stored(self, layer: LayerSpec) -> bool:
        """As the configuration says: is_quantized."""
        return self._stored

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """Checkpoint tensors by suffix."""
        raise NotImplementedError

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Nothing to do for formats that only come from checkpoints."""
        raise ConfigError(
            f"--quantization {self.name} reads checkpoints that are quantized already; this one is "
            "in full precision; possible for it: wint8, wint4, w8a8, w4a8, block_wise_fp8, wfp8afp8"
        )

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """Packed for the MoE driver, or with the kernel that will multiply it."""
        packed = self._checked(layer, tensors)
        if layer.role == "experts":
            return packed
        operation = packed.format.linear
        return self._kernels[operation], self._kernels.prepare(operation, packed)

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight | None:
        """The packed weight: its format has products."""
        return self._checked(layer, tensors)

    def _checked(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        for suffix, tensor in tensors.items():
            if "scale" in suffix:
                check_scale(self.xp, f"{layer.name}.{suffix}", tensor)
        return replace(self.pack(layer, tensors), dtype=layer.dtype)

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with the kernel."""
        product, weight = prepared
        y: Tensor = product(x, weight, bias)
        return y

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """[N, K] float32."""
        return self._checked(layer, tensors).dequantize()


def names_in(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The list of names under a key of quantization_config; empty without that key."""
    names = config.get(key) or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} of the quantization is {names!r:.80}; expected a list of names")
    return tuple(names)


def check_scale(xp: Any, name: str, scale: Tensor) -> None:
    """WeightError unless every scale is a finite number other than zero."""
    wide = scale.float()
    finite = xp.isfinite(wide)
    if not bool(finite.all()):
        raise WeightError(
            f"tensor {name} holds a scale that is not a finite number; the quantized checkpoint is "
            "damaged; download it or quantize the model again"
        )
    if not bool((wide != 0).all()):
        raise WeightError(
            f"tensor {name} holds a scale of zero; the quantized checkpoint is damaged; download "
            "it or quantize the model again"
        )


def group_size_of(config: Mapping[str, Any], default: int = 0) -> int:
    """The configured group size; 0 and -1 mean one scale per output."""
    value = config.get("group_size", default)
    if value in (None, -1):
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"group_size is {value!r}; expected a number of inputs, 0 or -1")
    return value


def check_group(layer: LayerSpec, group_size: int, method: str) -> None:
    """ConfigError unless the inputs of a layer are whole groups."""
    if group_size and layer.in_features % group_size:
        possible = [g for g in (32, 64, 128, 256) if layer.in_features % g == 0]
        raise ConfigError(
            f"{method}: group_size {group_size} does not divide the {layer.in_features} inputs of "
            f"{layer.name} (on this rank); possible: {', '.join(map(str, [0, *possible]))} "
            "(0: one scale per output)"
        )


def largest_scale(layer: LayerSpec, scale: Tensor) -> Tensor:
    """Static activation scales of joined parts. The parts share their input, so the largest scale
    holds for all.

    From [1], or [parts, 1] of a joined layer, with a leading dimension of experts if there are any;
    to [1] or [E, 1], float32.
    """
    lead = [layer.num_experts] if layer.num_experts else []
    return scale.float().reshape([*lead, -1]).amax(dim=-1, keepdim=True)


def spread_parts(xp: Any, layer: LayerSpec, scale: Tensor) -> Tensor:
    """From one scale per part to one per output: [N, 1] or [E, N, 1]."""
    lead = [layer.num_experts] if layer.num_experts else []
    rows = [part.out_features for part in layer.parts] or [layer.out_features]
    flat = scale.reshape([*lead, -1])
    if flat.shape[-1] != len(rows):  # one part, or one scale for all of them
        rows = [layer.out_features]
    pieces = [flat[..., n : n + 1].expand([*lead, count]) for n, count in enumerate(rows)]
    return xp.cat(pieces, -1).unsqueeze(-1).contiguous()
