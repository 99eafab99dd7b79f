"""A number format: which tensors a layer needs, how they are filled, and how a product is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .device import DeviceBackend
    from .ops import KernelTable


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of a layer; shape as this rank holds it; shard_dim None means every rank holds it all."""

    shape: tuple[int, ...]
    dtype: str
    shard_dim: int | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The layer a quantizer is asked about. `name` is its checkpoint prefix, such as
    model.layers.3.mlp.down_proj.

    Sizes are this rank's. `parallel` says which side is divided among ranks: "column" the outputs,
    "row" the inputs. Layers that are multiplied together (q, k and v; gate and up) are asked about
    one by one for their checkpoint tensors, then as one layer, their tensors concatenated along
    shard_dim, or stacked along a new first dimension where shard_dim is None.
    """

    name: str
    role: Literal["linear", "experts", "embedding", "lm_head"]
    in_features: int
    out_features: int
    num_experts: int = 0
    dtype: str = "float32"
    has_bias: bool = False
    parallel: Literal["none", "column", "row"] = "none"


@dataclass(frozen=True, slots=True)
class QuantizationQuestion:
    """Asked of `fd_quantizer_for`: who reads this checkpoint's quantization_config, or this name?"""

    name: str  # from --quantization, may be empty
    config: Mapping[str, Any]  # quantization_config of config.json, may be empty
    device: str
    tensor_library: str


@runtime_checkable
class Quantizer(Protocol):
    """Constructed as `Driver(config, device, kernels)` once per model. All tensors are xp tensors."""

    name: str
    contract: tuple[int, int]

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None: ...

    def supports(self, layer: LayerSpec) -> bool:
        """False leaves the layer in the model's dtype (and the start-up report says so)."""
        ...

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """Checkpoint tensors of the layer, by suffix ("weight", "weight_scale", ...)."""
        ...

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Online: full-precision weight [out, in] (or [experts, out, in]) to the tensors stored."""
        ...

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """After loading: lay tensors out for the kernel; the result is passed to apply()."""
        ...

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in_features] to [num_tokens, out_features]."""
        ...
