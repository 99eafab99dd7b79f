"""MoE driver `xpu_moe`: the vendor's fused operator, routing and router included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.errors import CapabilityError

from .operators import OPERATORS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor


class XpuMoE:
    """Experts in the model's dtype."""

    name = "xpu_moe"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts", "gate"] = "gate"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec = spec

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """As they are: [experts, outputs, inputs]."""
        return gate_up, down

    def forward(self, *inputs: Any) -> Tensor:
        """Not called: the unit includes the router."""
        raise CapabilityError("driver xpu_moe multiplies with the router; see forward_gate()")

    def forward_gate(
        self, x: Tensor, weights: Any, router: Tensor, correction_bias: Tensor | None
    ) -> Tensor:
        """[num_tokens, hidden]."""
        y: Tensor = OPERATORS["xpu_moe_layer"](
            *(x, router, correction_bias, *weights),
            *(None, None),  # biases
            *(None, None, None),  # scales of quantized weights and inputs
            *("w16a16", self.spec.routing.top_k, False),
        )
        return y
