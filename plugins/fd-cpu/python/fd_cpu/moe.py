"""Mixture of experts: routing, then every expert's products as one pool of work for the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_core.contracts.quant_formats import PackedWeight

from .formats import pack_format
from .packing import Packed, pack
from .team import team

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


class PackedExperts:
    """All experts of one layer."""

    def __init__(self, gate_up: list[Packed], down: list[Packed]) -> None:
        from . import _native

        self.matrices = (gate_up, down)  # the native record only points to the matrices
        self.native = _native.Experts([m.native for m in gate_up], [m.native for m in down])


class X86MoE:
    """One instance per distinct spec."""

    name = "x86_experts"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts"] = "routing_experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self._spec, self._dtype = spec, device.xp.dtype(spec.dtype)
        self._route = kernels["moe_routing"]

    def prepare_weights(
        self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight
    ) -> PackedExperts:
        """Every expert's matrices in the kernels' layout."""
        return PackedExperts(self._pack(gate_up, gated=True), self._pack(down, gated=False))

    def _pack(self, weights: Tensor | PackedWeight, *, gated: bool) -> list[Packed]:
        experts = range(self._spec.routing.num_experts)
        if isinstance(weights, PackedWeight):
            return [pack_format(weights.expert(e), self._dtype, gated=gated) for e in experts]
        return [pack(weights[e], gated=gated) for e in experts]

    def forward(
        self,
        x: Tensor,
        weights: PackedExperts,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """[num_tokens, hidden]; routes by spec.routing unless the routing is given."""
        if topk_ids is None or topk_weights is None:
            topk_ids, topk_weights = self._route(router_logits, correction_bias, self._spec.routing)
        return run_experts(x, topk_ids, topk_weights, weights)


class Undecided:
    """All experts' matrices of one kind, before it is known whether they are gate-up or down: the
    table's kernels only learn that from the position of the argument."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight: PackedWeight | None = weight
        self.packed: list[Packed] = []

    def pack(self, dtype: Any, *, gated: bool) -> list[Packed]:
        """Pack once; the tensors are then released."""
        if self._weight is not None:
            weight, self._weight = self._weight, None
            experts = range(weight.num_experts)
            self.packed = [pack_format(weight.expert(e), dtype, gated=gated) for e in experts]
        return self.packed


def prepare_experts(weight: PackedWeight) -> Undecided:
    """Kernel.prepare of every moe_experts_<format>."""
    return Undecided(weight)


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Undecided, down: Undecided
) -> Tensor:
    """For drivers that use the table; X86MoE calls run_experts with its own weights."""
    experts = PackedExperts(gate_up.pack(x.dtype, gated=True), down.pack(x.dtype, gated=False))
    return run_experts(x, topk_ids, topk_weights, experts)


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
    """Weighted sum over the chosen experts, [num_tokens, hidden]."""
    t, x = team(), x.contiguous()
    num_tokens, width = map(int, x.shape)
    y = t.new((num_tokens, width), x.dtype)
    if num_tokens:
        ids, weights = ids.contiguous(), weights.contiguous()
        t.call(
            t.native.experts,
            *(experts, x, ids, weights, y, t.code(x), num_tokens, width, int(ids.shape[1])),
            reads=(x, ids, weights),
        )
    return y
