"""Operations of mixtures of experts."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.tensor import Tensor


class MoEOperations(Protocol):
    """E experts, KE of them for each token."""

    def moe_routing(
        self,
        router_logits: Annotated[Tensor, "T E", "float32"],
        correction_bias: Annotated[Tensor, "E", "float32"] | None,
        spec: RoutingSpec,
        /,
    ) -> tuple[Annotated[Tensor, "T KE", "int64"], Annotated[Tensor, "T KE", "float32"]]:
        """(ids, weights) of the spec's top_k experts of each token, in any order. The bias only
        changes which experts are chosen."""
        ...

    def moe_experts(
        self,
        x: Annotated[Tensor, "T H"],
        topk_ids: Annotated[Tensor, "T KE", "int64"],
        topk_weights: Annotated[Tensor, "T KE", "float32"],
        gate_up: Annotated[Tensor, "E 2*I H"],
        down: Annotated[Tensor, "E H I"],
        /,
    ) -> Annotated[Tensor, "T H"]:
        """Of each token's experts: linear by down of silu_and_mul of linear by gate_up, times the
        weight; their sum."""
        ...
