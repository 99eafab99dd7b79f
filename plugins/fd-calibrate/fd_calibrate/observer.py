"""Observes a model for the quantizer that will round it: every weight and every input.

As a Quantizer it gives layers their full-precision weights and records what they multiply. As an
MoE driver it does the same for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from fastdeploy_core.contracts.quantizer import CalibratedQuantizer, Calibration
from fastdeploy_core.reference.ops.moe import one_by_one, through_experts

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec, Quantizer
    from fastdeploy_core.tensor import Tensor

# Second moments of an expert with few tokens are mixed with those of the layer, as if the expert
# had seen this many of the layer's tokens, as a multiple of the number of inputs.
_LEANING: Final = 8


@dataclass(slots=True, eq=False)
class Seen:
    """The observed inputs of one matrix."""

    num_tokens: int = 0
    peak: float = 0.0
    moments: Tensor | None = None  # [K, K] float32, a sum over tokens


@dataclass(slots=True, eq=False)
class Observed:
    """A layer that will be rounded: its weight ([out, in], or one for each expert) and inputs."""

    spec: LayerSpec
    weight: Tensor
    wants: Literal["none", "peak", "hessian"]
    seen: list[Seen] = field(default_factory=list)

    def observe(self, xp: Any, x: Tensor, expert: int = 0) -> None:
        """x [tokens, in_features] is about to be multiplied."""
        if self.wants == "none" or not x.shape[0]:
            return
        seen, wide = self.seen[expert], x.float()
        seen.num_tokens += int(x.shape[0])
        seen.peak = max(seen.peak, float(wide.abs().max()))
        if self.wants == "hessian":
            moments = xp.matmul(wide.transpose(0, 1).contiguous(), wide)
            seen.moments = moments if seen.moments is None else seen.moments + moments

    def calibration(self, xp: Any, expert: int = 0) -> Calibration:
        """The observations; for an expert with few tokens, mixed with the layer's."""
        seen = self.seen[expert]
        tokens = sum(one.num_tokens for one in self.seen)
        peak = seen.peak or max(one.peak for one in self.seen)
        if self.wants != "hessian" or not tokens:
            return Calibration(seen.num_tokens, peak)
        own = np.zeros((self.spec.in_features,) * 2)
        if seen.moments is not None:
            own = np.array(xp.to_numpy(seen.moments), np.float64)
        if len(self.seen) == 1:
            return Calibration(tokens, peak, (own / tokens).astype(np.float32))
        whole = sum(
            np.array(xp.to_numpy(one.moments), np.float64)
            for one in self.seen
            if one.moments is not None
        )
        leaning = self.spec.in_features / _LEANING
        mixed = (own + whole / tokens * leaning) / (seen.num_tokens + leaning)
        return Calibration(tokens, peak, mixed.astype(np.float32))


class Observer:
    """A Quantizer that wraps another one.

    `take(layer, weight)`, if given, is called for every matrix once it is complete: rounding
    without calibration, where nothing is kept.
    """

    name = "observer"
    contract = (1, 0)

    def __init__(
        self,
        inner: Quantizer,
        device: DeviceBackend,
        kernels: KernelTable,
        take: Callable[[LayerSpec, Tensor], None] | None = None,
    ) -> None:
        self.inner, self._xp = inner, device.xp
        self._take = take
        self.layers: list[Observed] = []  # complete layers in the order of loading
        self.taken: list[LayerSpec] = []  # every layer that the inner quantizer takes

    def supports(self, layer: LayerSpec) -> bool:
        """As the inner quantizer says."""
        taken = self.inner.supports(layer)
        if taken:
            self.taken.append(layer)
        return taken

    def joins(self, layer: LayerSpec) -> bool:
        """As the inner quantizer says: parts that it rounds separately are observed separately."""
        return self.inner.joins(layer)

    def is_stored(self, layer: LayerSpec) -> bool:
        """False: the checkpoint is in full precision."""
        return False

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """As the inner quantizer says."""
        return self.inner.parameters(layer)

    def quantize(self, layer: LayerSpec, weight: Tensor) -> dict[str, Tensor]:
        """The weight itself, kept until the layer has been observed; nothing if `take` got it."""
        if self._take is None:
            return {"weight": weight}
        self._take(layer, weight)
        return {}

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """The record that collects observations."""
        if self._take is not None:
            return None
        wants: Literal["none", "peak", "hessian"] = "none"
        if isinstance(self.inner, CalibratedQuantizer):
            wants = self.inner.calibration(layer)
        seen = [Seen() for _ in range(max(1, layer.num_experts))]
        observed = Observed(layer, tensors["weight"], wants, seen)
        self.layers.append(observed)
        return observed

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product in full precision."""
        prepared.observe(self._xp, x)
        y: Tensor = self._xp.linear(x, prepared.weight, bias)
        return y

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """As the inner quantizer does."""
        return self.inner.dequantize(layer, tensors)


class ObservingMoE:
    """An MoE driver that observes each expert's inputs."""

    name = "observer"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts"] = "routing_experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec, self._xp = spec, device.xp
        self._route, self._experts = kernels["moe_routing"], kernels["moe_experts"]

    def prepare_weights(self, gate_up: Any, down: Any) -> Any:
        """Tensors, or Observed records."""
        return gate_up, down

    def forward(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """[num_tokens, hidden]."""
        del topk_ids, topk_weights
        ids, scores = self._route(router_logits, correction_bias, self.spec.routing)
        gate_up, down = weights
        if not isinstance(gate_up, Observed):
            y: Tensor = self._experts(x, ids, scores, gate_up, down)
            return y
        xp = self._xp

        def expert(index: int, rows: Tensor) -> Tensor:
            gate_up.observe(xp, rows, index)
            hidden = xp.silu_and_mul(xp.linear(rows, gate_up.weight[index]))
            down.observe(xp, hidden, index)
            return xp.linear(hidden, down.weight[index])

        def compute(
            xp: Any, order: np.ndarray, experts: np.ndarray, counts: np.ndarray
        ) -> tuple[Tensor, np.ndarray]:
            del experts
            return one_by_one(xp, x, order, counts, expert), np.arange(len(order))

        return through_experts(x, ids, scores, self.spec.routing.num_experts, compute)


class ObservingKernels:
    """A kernel table whose cache write also shows the rows to be cached."""

    def __init__(self, kernels: KernelTable, show: Callable[[tuple[Tensor, ...]], None]) -> None:
        self._kernels, self._show, self.device = kernels, show, kernels.device

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        kernel = self._kernels[operation]
        if operation != "kv_write":
            return kernel

        def write(rows: tuple[Tensor, ...], cache: Any, slots: Tensor) -> None:
            self._show(rows)
            kernel(rows, cache, slots)

        return write

    def __contains__(self, operation: object) -> bool:
        return operation in self._kernels

    def prepare(self, operation: str, weight: Any) -> Any:
        """Delegates to the wrapped table."""
        return self._kernels.prepare(operation, weight)

    def takes(self, operation: str, format_name: str) -> bool:
        """Delegates to the wrapped table."""
        return self._kernels.takes(operation, format_name)

    def activations(self, operation: str) -> str:
        """Delegates to the wrapped table."""
        return self._kernels.activations(operation)

    def behind(self, operation: str, before: str) -> Callable[..., Any] | None:
        """Delegates to the wrapped table."""
        return self._kernels.behind(operation, before)

    def origins(self) -> Mapping[str, str]:
        """Delegates to the wrapped table."""
        return self._kernels.origins()
