"""A number format: which tensors a layer needs, how they are filled, and how a product is taken.

A quantizer reads one kind of checkpoint, or makes its tensors from full-precision weights, and ends
in an internal format (quant_formats.py). Its methods are called while a model is built and loaded;
only `apply` runs per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor

    from .device import DeviceBackend
    from .ops import KernelTable
    from .quant_formats import PackedWeight

# The quantizer, and its internal format, of an embedding that is shared with the head where the
# model's own quantizer takes heads: the parent process resolves it beside any other.
HEAD_QUANTIZER: Final = "wint8"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One tensor of a layer; shape as this rank holds it; shard_dim None means every rank holds it
    all.

    `dtype` is what the checkpoint must hold; a floating one stands for all of float32, float16 and
    bfloat16. `dummy` is what `--load-format dummy` fills it with; None: random bits (integers,
    fp8). An optional tensor may be missing in the checkpoint; prepare() then finds no entry."""

    shape: tuple[int, ...]
    dtype: str
    shard_dim: int | None = None
    dummy: float | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One checkpoint matrix of a joined layer: its prefix and its outputs on this rank."""

    name: str
    out_features: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The layer a quantizer is asked about. `name` is its checkpoint prefix, such as
    model.layers.3.mlp.down_proj.

    Sizes are this rank's. `parallel` says which side is divided among ranks: "column" the outputs,
    "row" the inputs. Layers that are multiplied together (q, k and v; gate and up) are asked about
    one by one for their checkpoint tensors, then as one layer whose `parts` name them, their
    tensors concatenated along shard_dim, or stacked along a new first dimension where shard_dim is
    None.

    Role "experts": asked about one expert's matrix (num_experts 0) for its checkpoint tensors and
    for quantize(), then with num_experts about all of them, their tensors stacked along a new first
    dimension. `name` is then ....experts.gate_up_proj or ....experts.down_proj."""

    name: str
    role: Literal["linear", "experts", "embedding", "lm_head"]
    in_features: int
    out_features: int
    num_experts: int = 0
    dtype: str = "float32"
    has_bias: bool = False
    parallel: Literal["none", "column", "row"] = "none"
    parts: tuple[LayerPart, ...] = ()  # empty: one checkpoint matrix, of this name
    shards: int = 1  # ranks that divide it


@dataclass(frozen=True, slots=True)
class QuantizationQuestion:
    """Asked of `fd_quantizer_for`: who reads this quantization_config, or this name?"""

    name: str  # the method asked for: of config (quantization, quant_method) or of --quantization
    config: Mapping[str, Any]  # quantization_config of config.json, or what --quantization says
    device: str
    tensor_library: str


@runtime_checkable
class Quantizer(Protocol):
    """Constructed as `Driver(config, device, kernels)` once per model. All tensors are xp tensors.

    `config` is the question's. Its key `is_quantized` says whether the checkpoint is quantized.
    """

    name: str
    contract: tuple[int, int]

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None: ...

    def supports(self, layer: LayerSpec) -> bool:
        """False leaves the layer in the model's dtype (and the start-up report says so); nothing
        below is asked about it then. A layer that the format cannot hold although the configuration
        wants it to is a ConfigError naming it.

        Of experts both matrices are asked about; one that stays keeps the other in full precision.
        """
        ...

    def joins(self, layer: LayerSpec) -> bool:
        """Whether the layer's parts can be one tensor; else each is loaded and multiplied alone."""
        ...

    def is_stored(self, layer: LayerSpec) -> bool:
        """Whether the checkpoint holds this layer's parameters(), or a full-precision weight."""
        ...

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """Checkpoint tensors of the layer, by suffix ("weight", "weight_scale", ...)."""
        ...

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """Online: full-precision weight [out, in] to stored tensors, as parameters() has them."""
        ...

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """After loading: check the tensors (WeightError names a bad one) and lay them out.

        The result is passed to apply(); of role "experts" it is a PackedWeight, which the MoE
        driver gets.
        """
        ...

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in_features] to [num_tokens, out_features]."""
        ...

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """The full-precision weight [out, in] (float32) that the stored tensors stand for.

        For layers that are computed in the model's dtype although the checkpoint has them quantized
        (the up-projection of latent attention), and for reports of the rounding error.
        """
        ...


@runtime_checkable
class PackingQuantizer(Quantizer, Protocol):
    """A Quantizer whose layers are products with an internal format and nothing else. A device
    whose own products take the format (Kernel.formats) then runs the layer as an unquantized
    one."""

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight | None:
        """What prepare() would multiply with; None where apply() does more than that."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What calibration text says about the inputs of one matrix (of one expert)."""

    num_tokens: int
    peak: float  # largest magnitude of an input
    hessian: np.ndarray | None = None  # [K, K] float32, the mean of x x^T over tokens


@runtime_checkable
class CalibratedQuantizer(Quantizer, Protocol):
    """A Quantizer that rounds better, or only, with calibration; `fastdeploy quantize` asks it."""

    def calibration(self, layer: LayerSpec) -> Literal["none", "peak", "hessian"]:
        """What quantize_calibrated() needs to know for this layer."""
        ...

    def quantize_calibrated(
        self, layer: LayerSpec, weight: Tensor, calibration: Calibration
    ) -> dict[str, Tensor]:
        """As quantize(), with what is known about the layer's inputs."""
        ...

    def checkpoint_config(self) -> dict[str, Any]:
        """quantization_config of a checkpoint that holds what this quantizer makes."""
        ...


@runtime_checkable
class ComposedQuantizer(Quantizer, Protocol):
    """A Quantizer made of others, such as one method for experts and one for everything else.

    `details["inner"]` of its answer to `fd_quantizer_for` names the others, divided by commas: the
    parent process resolves them, too, and every process loads exactly those.
    """

    is_composed: Literal[True]

    def __init__(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        kernels: KernelTable,
        quantizers: FindQuantizer,
    ) -> None: ...


# The class of a quantizer that was resolved, by its entry-point name; PluginNotFound for others.
FindQuantizer = Callable[[str], type[Quantizer]]


def make_quantizer(
    name: str,
    config: Mapping[str, Any],
    device: DeviceBackend,
    kernels: KernelTable,
    quantizers: FindQuantizer,
) -> Quantizer:
    """The quantizer of that entry-point name, constructed as its Protocol says."""
    driver: Any = quantizers(name)
    others = (quantizers,) if getattr(driver, "is_composed", False) else ()
    made: Quantizer = driver(config, device, kernels, *others)
    return made
