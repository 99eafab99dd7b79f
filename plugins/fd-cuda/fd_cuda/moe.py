"""MoE driver `cuda`: routing and experts through the device's kernels.

Weights stay as checkpoints hold them; the kernels read them so. Quantized experts are laid out by the
operation of their format, which takes the place of moe_experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.quant_formats import PackedWeight

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
        self._route, self._kernels = kernels["moe_routing"], kernels

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """With the kernel that multiplies them."""
        if isinstance(gate_up, PackedWeight):
            name, kernels = gate_up.format.experts, self._kernels
            return kernels[name], kernels.prepare(name, gate_up), kernels.prepare(name, down)
        return self._kernels["moe_experts"], gate_up.contiguous(), down.contiguous()

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
        experts, gate_up, down = weights
        y: Tensor = experts(x, topk_ids, topk_weights, gate_up, down)
        return y
