"""Mixture-of-experts operations: the choice of experts for each token, and their computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import RoutingSpec
    from fastdeploy_core.tensor import Tensor

# The lower bound that transformers uses for divisors.
_SOFTMAX_FLOOR = 1e-12
_SIGMOID_FLOOR = 1e-20
# One batched product is faster than a product per expert while experts get few rows each (a decode
# step), if padding to the busiest expert's rows does not multiply the work.
_MAX_TOGETHER = 64
_MAX_PADDING = 2
# Up to this many tokens, an accelerator runs every expert over every token. Sorting tokens by
# expert would wait for the device in every layer and could not be captured. Larger batches are
# sorted.
_MAX_UNSORTED = 256
# Numbers that the computation of all experts may hold at once.
_MAX_HELD = 1 << 24
Compute = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], tuple["Tensor", np.ndarray]]


def moe_routing(
    router_logits: Tensor, correction_bias: Tensor | None, spec: RoutingSpec
) -> tuple[Tensor, Tensor]:
    """Choose spec.top_k experts for each token.

    router_logits [T, E] float32, correction_bias [E] float32 or None. The bias changes which
    experts are chosen, never their weights. Returns (topk_ids [T, k] int64, topk_weights [T, k]
    float32).
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
    """-inf outside the top_k_groups groups with the highest sums of their two best experts."""
    tokens, experts = ranking.shape
    grouped = ranking.reshape([tokens, spec.num_groups, experts // spec.num_groups])
    best, _ = xp.topk(grouped, min(2, grouped.shape[2]), -1)
    _, chosen = xp.topk(best.sum(dim=-1), spec.top_k_groups, -1)
    penalty = xp.full(
        [tokens, spec.num_groups], float("-inf"), dtype=xp.float32, device=ranking.device
    )
    open_groups = xp.zeros(list(chosen.shape), dtype=xp.float32, device=ranking.device)
    penalty = xp.scatter(penalty, 1, chosen, open_groups)
    return (grouped + penalty.unsqueeze(-1)).reshape([tokens, experts])


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs.

    x [T, H], topk_ids [T, k] int64, topk_weights [T, k] float32, gate_up [E, 2I, H] (gate rows
    first), down [E, H, I]: [T, H] in x's dtype.
    """
    if str(x.device) != "cpu" and 0 < x.shape[0] <= _MAX_UNSORTED:
        return _all_experts(namespace(x), x, topk_ids, topk_weights, gate_up, down)

    def compute(
        xp: Any, order: np.ndarray, ids: np.ndarray, counts: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        if _is_even(counts, len(ids)):
            return _together(xp, x, order, ids, counts, gate_up, down)

        def expert(index: int, rows: Tensor) -> Tensor:
            hidden = xp.silu_and_mul(xp.linear(rows, gate_up[index]))
            return xp.linear(hidden, down[index])

        return one_by_one(xp, x, order, counts, expert), np.arange(len(order))

    return through_experts(x, topk_ids, topk_weights, gate_up.shape[0], compute)


def _all_experts(
    xp: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Every expert over every token, times a weight that is mostly 0. Results of experts that were
    not chosen may not be finite, so they are replaced by zeros instead of multiplied by 0."""
    experts, tokens = gate_up.shape[0], x.shape[0]
    none = xp.full([tokens, experts], -1.0, dtype=xp.float32, device=x.device)
    weights = xp.scatter(none, 1, topk_ids, topk_weights.float()).transpose(0, 1).unsqueeze(2)
    total: Any = None
    step = max(1, _MAX_HELD // (tokens * gate_up.shape[1]))
    for first in range(0, experts, step):
        part = slice(first, first + step)
        rows = x.unsqueeze(0).expand([gate_up[part].shape[0], *x.shape])
        y = xp.matmul_nt(xp.silu_and_mul(xp.matmul_nt(rows, gate_up[part])), down[part]).float()
        own = xp.where(weights[part] >= 0, y * weights[part], xp.zeros_like(y)).sum(0)
        total = own if total is None else total + own
    return total.to(x.dtype)


def through_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, compute: Compute
) -> Tensor:
    """Sort (token, expert) pairs by expert, compute their rows, restore the order and add them up.

    compute(xp, tokens, experts, counts): tokens and experts of each pair sorted by expert, and the
    number of pairs of each expert; returns (rows, the row of each pair).
    """
    xp = namespace(x)
    tokens, width = x.shape
    if tokens == 0:
        return xp.zeros_like(x)
    top_k = topk_ids.shape[1]
    ids = xp.to_numpy(topk_ids).reshape(-1)
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids, minlength=num_experts)
    y, places = compute(xp, order // top_k, ids[order], counts)
    back = np.empty_like(order)
    back[order] = places
    chosen = xp.index_select(y, 0, _upload(xp, back, x)).view([tokens, top_k, width])
    if x.dtype != xp.float32:
        chosen = chosen.to(xp.float32)
    return xp.matmul(topk_weights.unsqueeze(1), chosen).view([tokens, width]).to(x.dtype)


def _is_even(counts: np.ndarray, total: int) -> bool:
    """Whether few enough rows are added when every expert gets as many rows as the busiest one."""
    most = int(counts.max())
    return most <= _MAX_TOGETHER and len(counts) * most <= _MAX_PADDING * total


def _together(
    xp: Any,
    x: Tensor,
    tokens: np.ndarray,
    experts: np.ndarray,
    counts: np.ndarray,
    gate_up: Tensor,
    down: Tensor,
) -> tuple[Tensor, np.ndarray]:
    """One batched product over all experts; rows are padded to the busiest expert's.

    tokens, experts: of each assignment, sorted by expert. Returns (rows, the row of each
    assignment).
    """
    most = int(counts.max())
    first = np.cumsum(counts) - counts
    places = np.arange(len(tokens)) - first[experts] + experts * most
    rows = np.zeros(len(counts) * most, dtype=np.int64)
    rows[places] = tokens
    grouped = xp.index_select(x, 0, _upload(xp, rows, x)).view([len(counts), most, x.shape[1]])
    hidden = xp.silu_and_mul(xp.matmul_nt(grouped, gate_up))
    return xp.matmul_nt(hidden, down).view([len(rows), x.shape[1]]), places


def one_by_one(
    xp: Any,
    x: Tensor,
    tokens: np.ndarray,
    counts: np.ndarray,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """expert(index, rows) for every expert that has tokens, joined in the order of `tokens`."""
    rows = xp.index_select(x, 0, _upload(xp, tokens, x))
    results = []
    start = 0
    for index, count in enumerate(counts.tolist()):
        if count:
            results.append(expert(index, rows[start : start + count]))
            start += count
    return xp.cat(results, 0)


def _upload(xp: Any, rows: np.ndarray, like: Tensor) -> Tensor:
    return xp.to_device(xp.from_numpy(rows), like.device)
