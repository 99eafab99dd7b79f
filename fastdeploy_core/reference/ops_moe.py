"""Mixture-of-experts operations: which experts a token visits, and what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import RoutingSpec
    from fastdeploy_core.tensor import Tensor

# What transformers guards the divisions with.
_SOFTMAX_FLOOR = 1e-12
_SIGMOID_FLOOR = 1e-20


def moe_routing(
    router_logits: Tensor, correction_bias: Tensor | None, spec: RoutingSpec
) -> tuple[Tensor, Tensor]:
    """Choose spec.top_k experts for each token.

    router_logits [T, E] float32, correction_bias [E] float32 or None. The bias changes which experts
    are chosen, never their weights. Returns (topk_ids [T, k] int64, topk_weights [T, k] float32).
    """
    xp = namespace(router_logits)
    if spec.scoring == "softmax":
        scores = xp.softmax(router_logits, -1)
    else:
        scores = xp.sigmoid(router_logits)
    ranking = scores if correction_bias is None else scores + correction_bias
    if spec.num_groups > 1:
        ranking = _keep_best_groups(xp, ranking, spec)
    weights, ids = xp.topk(ranking, spec.top_k, -1)
    if ranking is not scores:
        weights = xp.gather(scores, 1, ids)
    if spec.renormalize:
        floor = _SOFTMAX_FLOOR if spec.scoring == "softmax" else _SIGMOID_FLOOR
        weights = weights / xp.clamp(weights.sum(dim=-1, keepdim=True), floor)
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    return ids, weights


def _keep_best_groups(xp: Any, ranking: Tensor, spec: RoutingSpec) -> Tensor:
    """-inf outside the top_k_groups groups whose two best experts sum highest."""
    tokens, experts = ranking.shape
    grouped = ranking.reshape([tokens, spec.num_groups, experts // spec.num_groups])
    best, _ = xp.topk(grouped, min(2, grouped.shape[2]), -1)
    _, chosen = xp.topk(best.sum(dim=-1), spec.top_k_groups, -1)
    penalty = xp.full(
        [tokens, spec.num_groups], float("-inf"), dtype=xp.float32, device=_device(ranking)
    )
    penalty = xp.scatter(penalty, 1, chosen, xp.zeros_like(best.sum(dim=-1))[:, : chosen.shape[1]])
    return (grouped + penalty.unsqueeze(-1)).reshape([tokens, experts])


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs.

    x [T, H], topk_ids [T, k] int64, topk_weights [T, k] float32, gate_up [E, 2I, H] (gate rows
    first), down [E, H, I]: [T, H] in x's dtype.
    """
    tokens, width = x.shape
    if tokens == 0:
        return namespace(x).zeros_like(x)
    xp = namespace(x)
    top_k = topk_ids.shape[1]
    flat = topk_ids.reshape([tokens * top_k])
    order = xp.argsort(flat, 0, stable=True)
    counts = xp.bincount(flat, minlength=gate_up.shape[0]).tolist()
    rows = xp.index_select(x, 0, order // top_k)
    results = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = xp.matmul_nt(rows[start : start + count], gate_up[expert])
            results.append(xp.matmul_nt(xp.silu_and_mul(part), down[expert]))
            start += count
    inverse = xp.argsort(order, 0)
    y = xp.index_select(xp.cat(results, 0), 0, inverse).reshape([tokens, top_k, width])
    if x.dtype == xp.float32:
        return (y * topk_weights.unsqueeze(-1)).sum(dim=1)
    return (y.to(xp.float32) * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _device(x: Tensor) -> Any:
    return x.device
