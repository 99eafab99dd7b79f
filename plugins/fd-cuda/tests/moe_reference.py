"""A block of experts in float64, expert by expert."""

from __future__ import annotations

import torch
from fastdeploy_core.contracts.moe import RoutingSpec


def reference(
    x: torch.Tensor,
    gain: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    spec: RoutingSpec,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """x + routed and shared experts of rms_norm(x); shared ones stand after the routed ones."""
    wide = x.double()
    y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * gain.double()
    y = y.to(x.dtype).double()  # what is near a tie may depend on it
    logits = y @ router.double().T
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranking = scores if bias is None else scores + bias.double()
    out = wide.clone()
    for token in range(x.shape[0]):
        ids = ranking[token].topk(spec.top_k).indices.tolist()
        chosen = scores[token, ids]
        if spec.renormalize:
            chosen = chosen / chosen.sum()
        weights = [*(chosen * spec.scaling_factor).tolist()]
        for expert in range(spec.num_experts, gate_up.shape[0]):
            ids.append(expert)
            weights.append(1.0)
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up[expert].double() @ y[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            out[token] += weight * (down[expert].double() @ inner)
    return out
