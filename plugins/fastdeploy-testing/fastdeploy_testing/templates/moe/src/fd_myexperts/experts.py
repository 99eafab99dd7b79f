"""Experts one after the other, each over the tokens that chose it. Right, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor


class MyExpertsMoE:
    """Unit "experts": the core has chosen the experts of each token."""

    name = "myexperts"
    contract = (1, 0)
    unit: Literal["experts", "routing_experts", "gate"] = "experts"

    def __init__(self, spec: MoESpec, device: DeviceBackend, kernels: KernelTable) -> None:
        self._device, self._xp = device, device.xp

    def prepare_weights(self, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight) -> Any:
        """Lay the weights out as your kernel wants them; here they stay as they are."""
        return gate_up, down

    def forward(
        self,
        x: Tensor,
        weights: Any,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> Tensor:
        """[num_tokens, hidden]."""
        assert topk_ids is not None and topk_weights is not None
        xp, (gate_up, down) = self._xp, weights
        total: Tensor = xp.zeros(list(x.shape), dtype=xp.float32, device=x.device)
        ids = xp.to_numpy(topk_ids)  # waits for the device: yours will sort there
        shares = topk_weights.reshape([-1, 1])
        for expert in np.unique(ids).tolist():
            tokens, choices = np.nonzero(ids == expert)
            rows = self._device.to_device(tokens)
            pairs = self._device.to_device(tokens * ids.shape[1] + choices)
            hidden = xp.silu_and_mul(xp.linear(xp.index_select(x, 0, rows), gate_up[expert]))
            y = xp.linear(hidden, down[expert]).float() * xp.index_select(shares, 0, pairs)
            xp.index_add_(total, 0, rows, y)
        result: Tensor = total.to(x.dtype)
        return result
