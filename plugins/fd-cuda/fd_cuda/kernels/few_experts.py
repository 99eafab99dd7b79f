"""A whole block of experts for few tokens in three CUDA C++ kernels: norm, router and routing; gate and up;
down, shared experts and the sum. Each of the tokens' experts is read for itself: up to a few tokens hardly
two share one, and finding that out would take a kernel."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final

import torch

from . import native
from .common import batch_invariant
from .routing import SIGMOID_FLOOR, SOFTMAX_FLOOR

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import RoutingSpec

MOST_TOKENS: Final = 1
_MOST_EXPERTS: Final = 256
_MOST_SHARED_BYTES: Final = 40 * 1024  # of experts_down: what all experts of one token made
_ROUTE_WARPS: Final = 8
_UP: Final = {"WARPS": 4, "AHEAD": 10}
_DOWN: Final = {"WARPS": 8, "AHEAD": 8}


def can_compute(
    x: torch.Tensor,
    router: torch.Tensor,
    spec: RoutingSpec,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> bool:
    """Whether these kernels serve such a block and so many tokens."""
    if not 0 < x.shape[0] <= MOST_TOKENS or not x.is_cuda or batch_invariant():
        return False
    return _serves(x.dtype, spec, router.dtype, gate_up.shape, gate_up.dtype, down.dtype) and all(
        t.data_ptr() % 16 == 0 and t.stride(-1) == 1 and t.stride(0) % 8 == 0
        for t in (x, router, gate_up, down)
    )


@functools.cache
def _serves(
    dtype: torch.dtype,
    spec: RoutingSpec,
    router: torch.dtype,
    gate_up: tuple[int, int, int],
    *weights: torch.dtype,
) -> bool:
    total, width, depth = gate_up[0], gate_up[1] // 2, gate_up[2]
    choices = spec.top_k + total - spec.num_experts
    return (
        dtype in (torch.bfloat16, torch.float16)
        and router == torch.float32
        and set(weights) == {dtype}
        and spec.num_groups == 1
        and spec.num_experts <= _MOST_EXPERTS
        and choices <= 32
        and depth % 256 == 0
        and depth % (64 * _UP["WARPS"]) == 0
        and width % 32 == 0
        and choices * width * 2 <= _MOST_SHARED_BYTES
        and native.available()
    )


def compute(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    spec: RoutingSpec,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """x + experts(rms_norm(x)), in x's memory; gate_up [E + S, 2I, H], down [E + S, H, I]: the S last
    experts are visited by every token."""
    tokens, hidden = x.shape
    experts, width = spec.num_experts, gate_up.shape[1] // 2
    shared = gate_up.shape[0] - experts
    choices = spec.top_k + shared
    at = {"device": x.device}
    scores = torch.empty((tokens, experts), dtype=torch.float32, **at)
    ids = torch.empty((tokens, choices), dtype=torch.int32, **at)
    weights = torch.empty((tokens, choices), dtype=torch.float32, **at)
    inner = torch.empty((tokens * choices, width), dtype=x.dtype, **at)
    is_half = x.dtype == torch.float16
    route, up, sum_up = _kernels(is_half, spec, shared, hidden, width, x.device.index)
    stride = ctypes.c_longlong(x.stride(0))
    floor = SOFTMAX_FLOOR if spec.scoring == "softmax" else SIGMOID_FLOOR
    native.launch(
        route,
        (-(-experts // _ROUTE_WARPS), tokens, 1),
        32 * _ROUTE_WARPS,
        [
            *(x, stride, norm_weight, router, bias, scores, _arrived(x.device), ids, weights),
            *(float(eps), floor, float(spec.scaling_factor)),
        ],
    )
    native.launch(
        up,
        (-(-width // 8), tokens * choices, 1),
        32 * _UP["WARPS"],
        [x, stride, norm_weight, gate_up, ids, inner, float(eps)],
    )
    x = x if x.is_contiguous() else x.contiguous()
    native.launch(
        sum_up,
        (-(-hidden // 16), tokens, 1),
        32 * _DOWN["WARPS"],
        [inner, down, ids, weights, x, x, hidden],
    )
    return x


@functools.cache
def _kernels(
    is_half: bool, spec: RoutingSpec, shared: int, hidden: int, width: int, device: int
) -> tuple[native.Function, ...]:
    same = {
        "HALF": int(is_half),
        "EXPERTS": spec.num_experts,
        "TOP_K": spec.top_k,
        "SHARED": shared,
    }
    routing = {
        "SIGMOID": int(spec.scoring == "sigmoid"),
        "RENORMALIZE": int(spec.renormalize),
        "WARPS": _ROUTE_WARPS,
    }
    return (
        native.function("route", {**same, **routing, "K": hidden}),
        native.function("experts_up", {**same, **_UP, "K": hidden, "WIDTH": width}),
        native.function("experts_down", {**same, **_DOWN, "K": width}),
    )


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    """Counters of blocks that have come, by token; kernels leave them as they find them."""
    return torch.zeros(32, dtype=torch.int32, device=device)
