"""MoE driver `reference`: routing and experts in plain tensor code, for any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class ReferenceMoE:
    """Calls the two MoE kernels of the device's table, or the reference's where it has none."""

    name = "reference"
    contract = CONTRACT
    unit: Literal["experts", "routing_experts"] = "routing_experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec = spec
        self._route = kernels["moe_routing"]
        self._kernels = kernels

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """The weights with the kernel of their format, in that kernel's layout."""
        if isinstance(gate_up, PackedWeight):
            name, kernels = gate_up.format.experts, self._kernels
            return kernels[name], kernels.prepare(name, gate_up), kernels.prepare(name, down)
        return self._kernels["moe_experts"], gate_up, down

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

    def forward_share(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        routing: RoutingSpec,
        first: int,
    ) -> Tensor:
        """See DividedMoEBackend."""
        xp = namespace(x)
        ids, shares = self._route(router_logits, correction_bias, routing)
        ids = ids - first
        is_here = (ids >= 0) & (ids < self.spec.routing.num_experts)
        elsewhere = xp.full(list(ids.shape), -1, dtype=ids.dtype, device=x.device)
        return self.forward_routed(x, weights, xp.where(is_here, ids, elsewhere), shares)

    def forward_routed(
        self, x: Tensor, weights: Any, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """Treats each valid choice as a token of its own, for the experts of any device."""
        xp, (experts, gate_up, down) = namespace(x), weights
        total = xp.zeros(list(x.shape), dtype=xp.float32, device=x.device)
        flat = topk_ids.reshape([-1])
        chosen = xp.nonzero(flat >= 0).reshape([-1])
        if not int(chosen.shape[0]):
            return total.to(x.dtype)
        tokens = chosen // topk_ids.shape[1]
        ids = xp.index_select(flat, 0, chosen).unsqueeze(1)
        shares = xp.index_select(topk_weights.reshape([-1]), 0, chosen).unsqueeze(1)
        rows = xp.index_select(x, 0, tokens)
        y = experts(rows, ids, shares, gate_up, down)
        return xp.index_add_(total, 0, tokens, y.float()).to(x.dtype)
