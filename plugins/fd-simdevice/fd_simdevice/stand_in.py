"""Stand-ins for vendors' operators: numpy on device tensors, strict about what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class StandIn:
    """Base of a fake operator module. Subclasses define operators as methods; `calls` counts
    them."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def count(self, name: str) -> None:
        """To be called by every operator."""
        self.calls[name] = self.calls.get(name, 0) + 1


@contextmanager
def standing_in(operators: Any, module: StandIn) -> Iterator[StandIn]:
    """Inside, `operators` (a VendorOperators) finds the stand-in's."""
    operators.use(module)
    try:
        yield module
    finally:
        operators.use()


class SortedExperts(StandIn):
    """Operators that sort tokens by expert and add the experts' rows up again."""

    def moe_expert_dispatch(
        self, x: Any, scores: Any, bias: Any, in_scale: Any, top_k: int, grouped: bool,
        algorithm: str, *, topk_only_mode: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Rows by expert, rows of each expert, where each pair's row is, weights, ids, nothing."""
        self.count("dispatch")
        tokens, experts = x.shape[0], scores.shape[1]
        check(scores, "float32", tokens, experts)
        assert bias is None and in_scale is None and not grouped and topk_only_mode
        values = read(scores)
        ids = np.argsort(-values, axis=1, kind="stable")[:, :top_k]
        order = np.argsort(ids.reshape(-1), kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        counts = np.bincount(ids.reshape(-1), minlength=experts)
        weights = np.take_along_axis(values, ids, 1)
        return (
            like(x, read(x)[order // top_k]),
            counts,
            places.reshape(tokens, top_k),
            weights,
            ids,
            None,
        )

    def moe_expert_reduce(
        self, rows: Any, weights: Any, places: Any, ids: Any, bias: Any,
        *, norm_topk_prob: bool, routed_scaling_factor: float,
    ) -> Any:  # fmt: skip
        """Weighted sums."""
        self.count("reduce")
        assert bias is None and not norm_topk_prob and routed_scaling_factor == 1.0
        return like(rows, (read(rows)[places] * weights[..., None]).sum(1))

    @staticmethod
    def gated(rows: Any, counts: Any, gate_up: np.ndarray, down: np.ndarray) -> Any:
        """What the experts make of their rows; matrices are [experts, outputs, inputs]."""
        expert = np.repeat(np.arange(len(counts)), counts)
        hidden = np.einsum("nk,nok->no", read(rows), gate_up[expert])
        gate, up = np.split(hidden, 2, -1)
        return like(rows, np.einsum("nk,nok->no", gate / (1 + np.exp(-gate)) * up, down[expert]))


def check(x: Any, dtype: str, *shape: int | None) -> None:
    """A tensor of that dtype and shape (None: any size), contiguous."""
    name = str(x.dtype).rpartition(".")[2]
    assert name == dtype, f"dtype {name}, expected {dtype}"
    got = tuple(x.shape)
    assert len(got) == len(shape), f"shape {got}, expected {shape}"
    assert all(want in (None, have) for have, want in zip(got, shape, strict=True)), (got, shape)
    assert x.is_contiguous(), "not contiguous"


def read(x: Any) -> np.ndarray:
    """Values, floats as float64."""
    if "float" in str(x.dtype):
        return np.array(x.astype("float32").numpy(), "float64")
    return np.array(x.numpy())


def write(x: Any, values: np.ndarray) -> None:
    """Overwrite a device tensor."""
    x.copy_(like(x, values))


def like(x: Any, values: np.ndarray) -> Any:
    """A new tensor with x's dtype and place."""
    import paddle

    return paddle.to_tensor(np.asarray(values, "float32"), place=x.place).astype(x.dtype)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of the last len(q) of len(k) tokens, [tokens, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * scale
    seen = np.arange(len(k))[None] <= np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended: np.ndarray = np.einsum("hqk,khd->qhd", weights, values)
    return attended


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, neox: bool) -> np.ndarray:
    """x [tokens, heads, dim]; cos, sin [tokens, dim / 2]. neox: pairs (i, i + dim / 2)."""
    half, out = x.shape[-1] // 2, x.copy()
    first, second = (
        (slice(0, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
    )
    a, b, c, s = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out
