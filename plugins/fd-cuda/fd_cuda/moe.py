"""MoE driver `cuda`: routing and experts through the device's kernels.

Weights stay as checkpoints hold them; the kernels read them so. Quantized experts come in through
prepare_weights (what it returns is what forward gets) and an operation of their own in place of
moe_experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class CudaMoE:
    """See MoEBackend."""

    name = "cuda"
    contract = (0, 1)
    unit: Literal["experts", "routing_experts"] = "routing_experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec = spec
        self._route, self._experts = kernels["moe_routing"], kernels["moe_experts"]

    def prepare_weights(self, gate_up: Tensor, down: Tensor) -> Any:
        """As they are, in one piece."""
        return gate_up.contiguous(), down.contiguous()

    def forward(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """[num_tokens, hidden]; routes by spec.routing unless the routing is given."""
        if topk_ids is None or topk_weights is None:
            topk_ids, topk_weights = self._route(router_logits, correction_bias, self.spec.routing)
        return self._experts(x, topk_ids, topk_weights, *weights)
