"""What adapters add to the products of routed experts: the operation `lora_experts` of fd-lora, and
the experts with both products apart.

Rows are pairs of a token and a chosen expert, ordered by expert (routing.py). A block of them has
one expert and mostly few adapters: a program goes through those of its rows, from the first to the
last, and leaves out the others. So nothing that was captured depends on who has which. Sums are
added in one order, so a row does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import quant_experts
from .adapted_rows import add_to_experts
from .experts import combined, grouped, tiles_for
from .norm import silu_and_mul
from .quant_linear import native_runs
from .quant_native import Grouping, product
from .quant_shapes import Few
from .quant_weights import Weights
from .routing import order_by_expert

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import ExpertAdapters


def lora_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """y [T * k, N] with what adapters add to experts' products, in its memory where that is
    possible: see fd_lora.kernels."""
    if topk_ids.numel():
        y = y if y.stride(1) == 1 else y.contiguous()
        x = x if x.stride(1) == 1 else x.contiguous()
        add_to_experts(y, x, a, b, tuple(ends), slots, topk_ids, num_experts)
    return y


def adapted_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor | Weights,
    down: torch.Tensor | Weights,
    adapters: ExpertAdapters,
) -> torch.Tensor:
    """moe_experts with what adapters add to both products, plain or packed."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    if not topk_ids.numel():
        return torch.empty_like(x)
    y = adapters.gate_up(_product(x, topk_ids, gate_up, topk_ids.shape[1]), x, topk_ids)
    hidden = silu_and_mul(y)
    y = adapters.down(_product(hidden, topk_ids, down, 1), hidden, topk_ids)
    return combined(y, topk_weights)


def _product(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    weight: torch.Tensor | Weights,
    divisor: int,
) -> torch.Tensor:
    """[T * k, N]: row pair / divisor of x times the matrix of the pair's expert. Packed weights
    stay as they are where rows are few; else those of all experts are dequantized for the call."""
    num_pairs, (tokens, top_k) = topk_ids.numel(), topk_ids.shape
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    if isinstance(weight, Weights):
        slabs = weight.slabs
        if slabs is not None and native_runs(x) and not weight.rounding:
            shape = quant_experts.choose(slabs, num_pairs / slabs.num_experts)
            if isinstance(shape, Few):
                order = order_by_expert(topk_ids, slabs.num_experts, shape.rows)
                grouping = Grouping(num_pairs, divisor, order)
                return product(shape, x, slabs, None, grouping=grouping)
        x, weight = weight.seen(x), weight.dequantized(x.dtype)
    tiles = tiles_for(tokens, top_k, weight.shape[0], x.dtype)
    order = order_by_expert(topk_ids, weight.shape[0], tiles.rows)
    return grouped(x, weight, order, tiles, num_pairs, divisor, gated=False)
