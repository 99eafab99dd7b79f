"""Products with packed weights of any format: dequantize, then multiply in float32.

Kernels of devices are compared with these, and they serve formats that a device has no kernel for.
They are slow on purpose: nothing is kept in full precision between calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.tensor import namespace

from .moe import one_by_one, through_experts

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor


def linear_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K], rounded as the format says, times the dequantized weight [N, K].T, plus bias."""
    xp = namespace(x)
    if x.shape[0] == 0:
        return xp.zeros([0, weight.out_features], dtype=x.dtype, device=x.device)
    seen = weight.activate(x).float()
    y = xp.linear(seen, weight.dequantize(), None if bias is None else bias.float())
    return y.to(x.dtype)


def moe_experts_packed(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
) -> Tensor:
    """moe_experts with packed weights; only experts that have tokens are dequantized."""

    def compute(
        xp: Any, order: np.ndarray, ids: np.ndarray, counts: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        del ids

        def expert(index: int, rows: Tensor) -> Tensor:
            hidden = xp.silu_and_mul(linear_packed(rows, gate_up.expert(index), None))
            return linear_packed(hidden, down.expert(index), None)

        return one_by_one(xp, x, order, counts, expert), np.arange(len(order))

    return through_experts(x, topk_ids, topk_weights, gate_up.num_experts, compute)
