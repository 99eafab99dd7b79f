"""MoE driver `cuda`: whole blocks, or routing and experts, through the device's kernels.

Weights stay in the checkpoint's layout, which the kernels read. Quantized experts are laid out by
the operation of their format, which replaces moe_experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from fastdeploy_core.contracts.quant_formats import PackedWeight

from .kernels import experts, matmul, norm
from .kernels.common import batch_invariant
from .kernels.expert_lora import adapted_experts
from .kernels.routing import route, with_shared

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import ExpertAdapters, MoESpec, RoutingSpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


# The operation of their format with both prepared matrices; None: the matrices are plain.
_Weights: TypeAlias = "tuple[Callable[..., Tensor] | None, Any, Any]"
# From this many tokens on, cuBLAS is faster for experts that every token visits.
_MANY_TOKENS: Final = 1024


class CudaMoE:
    """See MoEBlockBackend, DividedMoEBackend and AdaptedMoEBackend."""

    name = "cuda"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts"] = "routing_experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self.spec, self._kernels = spec, kernels

    def prepare_weights(
        self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight
    ) -> _Weights:
        """With the kernel of their format; None: the weights are in the model's dtype."""
        if isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight):
            name, kernels = gate_up.format.experts, self._kernels
            return kernels[name], kernels.prepare(name, gate_up), kernels.prepare(name, down)
        return None, gate_up.contiguous(), down.contiguous()

    def forward(
        self,
        x: Tensor,
        weights: _Weights,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """[num_tokens, hidden]; routes by spec.routing unless the routing is given."""
        packed, gate_up, down = weights
        if packed is None:
            given = (topk_ids, topk_weights)
            return self._sum(x, gate_up, down, router_logits, correction_bias, *given, None)
        if topk_ids is None or topk_weights is None:
            choose = self._kernels["moe_routing"]
            topk_ids, topk_weights = choose(router_logits, correction_bias, self.spec.routing)
        y: Tensor = packed(x, topk_ids, topk_weights, gate_up, down)
        return y

    def forward_block(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        router_weight: Tensor,
        correction_bias: Tensor | None,
        weights: _Weights,
    ) -> Tensor:
        """x + experts(rms_norm(x))."""
        _, gate_up, down = weights
        y = norm.rms_norm(x, norm_weight, eps)
        logits = matmul.scores_in_parts(y, router_weight)
        return self._sum(y, gate_up, down, logits, correction_bias, None, None, x)

    def forward_share(
        self,
        x: Tensor,
        weights: _Weights,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        routing: RoutingSpec,
        first: int,
    ) -> Tensor:
        """The part of the sum that comes from this rank's experts."""
        held = (first, self.spec.routing.num_experts)
        given = route(router_logits, correction_bias, routing, 0, held)
        return self._some(x, weights, *given, held[1] / routing.num_experts)

    def forward_routed(
        self, x: Tensor, weights: _Weights, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """With choices that were made elsewhere."""
        topk_weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
        return self._some(x, weights, topk_ids, topk_weights, 1.0)

    def forward_adapted(
        self,
        x: Tensor,
        weights: _Weights,
        topk_ids: Tensor,
        topk_weights: Tensor,
        adapters: ExpertAdapters,
    ) -> Tensor:
        """With choices that were made elsewhere, and what adapters add to both products."""
        _, gate_up, down = weights
        return adapted_experts(x, topk_ids, topk_weights, gate_up, down, adapters)

    @staticmethod
    def _some(
        x: Tensor, weights: _Weights, topk_ids: Tensor, topk_weights: Tensor, present: float
    ) -> Tensor:
        """The sum without choices of -1, whose weights are 0; `present`: the share of other
        choices."""
        packed, gate_up, down = weights
        if packed is None:
            return experts.sum_of_experts(x, topk_ids, topk_weights, gate_up, down, None, present)
        # Kernels of packed weights cannot skip absent experts: the first expert computes unused
        # rows.
        y: Tensor = packed(x, topk_ids.clamp(min=0), topk_weights, gate_up, down)
        return y

    def _sum(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """residual + routed and shared experts; the residual may be overwritten."""
        spec, shared = self.spec, self.spec.num_shared_experts
        is_apart = shared > 0 and x.shape[0] >= _MANY_TOKENS and not batch_invariant()
        joined = 0 if is_apart else shared
        if topk_ids is None or topk_weights is None:
            topk_ids, topk_weights = route(router_logits, correction_bias, spec.routing, joined)
        elif joined:
            topk_ids, topk_weights = with_shared(
                topk_ids, topk_weights, spec.routing.num_experts, joined
            )
        total = experts.sum_of_experts(x, topk_ids, topk_weights, gate_up, down, residual)
        if is_apart:
            first = spec.routing.num_experts
            for expert in range(first, first + shared):
                total = experts.add_expert(x, gate_up[expert], down[expert], total)
        return total
