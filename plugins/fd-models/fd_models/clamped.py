"""Operations of gpt-oss's experts (arXiv 2508.10925) in plain tensor code: the definitions that
cells of devices are tested against."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.ops import Kernel, KernelTable
from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.tensor import Tensor, namespace

# Tokens up to which an accelerator is not asked which experts were chosen.
MOST_AT_ONCE = 1024


def moe_experts_clamped(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor | PackedWeight,
    gate_up_bias: Tensor,
    down: Tensor | PackedWeight,
    down_bias: Tensor | None,
    alpha: float,
    limit: float,
) -> Tensor:
    """Weighted sum of the chosen experts, between whose matrices stands (clamp(up) + 1) * gate *
    sigmoid(alpha * gate), gate cut at the limit, too.

    x [T, H], topk_ids [T, k] int64, topk_weights [T, k] float32, gate_up [E, 2I, H] and its bias
    [E, 2I], whose rows are gate and up in turn, down [E, H, I] and its bias [E, H]: [T, H] in x's
    dtype. The matrices are plain, or in a format that the cell takes (Kernel.formats).
    """
    xp, tokens, top_k = namespace(x), int(x.shape[0]), int(topk_ids.shape[1])
    matrices = _plain(gate_up, x), _plain(down, x)

    def run(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., tokens, hidden] by the experts that `of` takes from all experts' tensors."""
        both = xp.matmul_nt(x, of(matrices[0])) + of(gate_up_bias)
        gate, up = both[..., 0::2], both[..., 1::2]
        gate, up = xp.clamp(gate, None, limit), xp.clamp(up, -limit, limit)
        y = xp.matmul_nt((up + 1) * gate * xp.sigmoid(gate * alpha), of(matrices[1]))
        return y if down_bias is None else y + of(down_bias)

    if str(x.device) != "cpu" and tokens <= MOST_AT_ONCE:
        return _at_once(xp, x, topk_ids, topk_weights, int(gate_up_bias.shape[0]), run)
    total = xp.zeros(list(x.shape), dtype=xp.float32, device=x.device)
    shares, chosen = topk_weights.reshape([-1]), xp.to_numpy(topk_ids)
    for expert in np.unique(chosen).tolist():
        own, nth = np.nonzero(chosen == expert)
        rows, places = (
            xp.to_device(xp.from_numpy(at), x.device) for at in (own, own * top_k + nth)
        )
        share = xp.index_select(shares, 0, places).unsqueeze(1)
        y = run(xp.index_select(x, 0, rows), itemgetter(expert))
        total = xp.index_add_(total, 0, rows, y.float() * share)
    return total.to(x.dtype)


def _at_once(
    xp: Any, x: Tensor, ids: Tensor, shares: Tensor, count: int, run: Callable[..., Tensor]
) -> Tensor:
    """Without asking the device who chose what, as captured steps need it: by copies of the chosen
    experts while those are few, else by all experts."""
    tokens, top_k = ids.shape
    if 3 * tokens * top_k <= count:
        flat = ids.reshape([-1])
        each = xp.repeat_interleave(x, top_k, 0).unsqueeze(1)
        y = run(each, lambda w: _rows(xp.index_select(w, 0, flat))).float()
        return (y.reshape([tokens, top_k, x.shape[1]]) * shares.unsqueeze(-1)).sum(1).to(x.dtype)
    experts = xp.arange(count, dtype=ids.dtype, device=ids.device)
    is_chosen = (ids.unsqueeze(-1) == experts).to(shares.dtype)  # [tokens, top_k, experts]
    share = (is_chosen * shares.unsqueeze(-1)).sum(1).transpose(0, 1)
    y = run(x.unsqueeze(0).expand([count, *x.shape]), _rows).float()
    return (y * share.unsqueeze(-1)).sum(0).to(x.dtype)


def _plain(weight: Tensor | PackedWeight, x: Tensor) -> Tensor:
    return weight.dequantize().to(x.dtype) if isinstance(weight, PackedWeight) else weight


def _rows(x: Tensor) -> Tensor:
    """Biases [experts, n] as [experts, 1, n], to be added to every token; matrices as they are."""
    return x.unsqueeze(1) if x.ndim == 2 else x


def moe_routing_widened(kernels: KernelTable) -> Callable[..., tuple[Tensor, Tensor]]:
    """moe_routing of logits in the model's dtype, widened to float32."""
    route = kernels["moe_routing"]

    def run(
        router_logits: Tensor, correction_bias: Tensor | None, spec: RoutingSpec
    ) -> tuple[Tensor, Tensor]:
        ids, weights = route(router_logits.float(), correction_bias, spec)
        return ids, weights

    return run


TABLE = {
    "moe_experts_clamped": "fd_models.clamped:moe_experts_clamped",
    "moe_routing_widened": Kernel("fd_models.clamped:moe_routing_widened", composes=True),
}
