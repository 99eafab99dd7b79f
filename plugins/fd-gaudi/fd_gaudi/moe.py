"""MoE driver `gaudi_moe`: the vendor's fused operator, routing and router included."""

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

CHUNK = 64  # tokens; FastDeploy 2.x's FD_HPU_CHUNK_SIZE


class GaudiMoE:
    """Experts in the model's dtype."""

    name = "gaudi_moe"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts", "gate"] = "gate"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec = spec

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """In PaddlePaddle's layout of matrices: [experts, inputs, outputs]."""
        matrices: Any = (gate_up, down)
        return tuple(w.transpose(1, 2).contiguous() for w in matrices)

    def forward(self, *inputs: Any) -> Tensor:
        """Not called: the unit includes the router."""
        raise CapabilityError("driver gaudi_moe multiplies with the router; see forward_gate()")

    def forward_gate(
        self, x: Tensor, weights: Any, router: Tensor, correction_bias: Tensor | None
    ) -> Tensor:
        """[num_tokens, hidden]."""
        y: Tensor = OPERATORS["fused_gate_moe"](
            *(x, router.transpose(0, 1).contiguous(), correction_bias, *weights),
            self.spec.routing.top_k,
            norm_topk_prob=True,
            permuted_weights=False,
            activation="silu",
            experts_min=0,
            experts_max=self.spec.routing.num_experts - 1,
            chunk_size=CHUNK,
        )
        return y
