"""The operations of contracts/ops/ in numpy and float64, for comparison with results.

Written from the contract and independent of reference/, so the reference device is tested too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import StateSpec
    from fastdeploy_core.contracts.moe import RoutingSpec

Array = np.ndarray


def softmax(x: Array) -> Array:
    """Over the last dimension."""
    weights = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    """Over the last dimension."""
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def silu(x: Array) -> Array:
    """x times its logistic function."""
    return x / (1 + np.exp(-x))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over its root mean square, times weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu_and_mul(x: Array) -> Array:
    """Gate half, then up half."""
    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]


def rotary(x: Array, positions: Array, cos_sin: Array, interleaved: bool) -> Array:
    """x [T, heads, D]; the first R dimensions turn."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions, None, :half], cos_sin[positions, None, half:]
    out = x.copy()
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    *,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    first: int = 0,
) -> Array:
    """One sequence: q [n, heads, d]: the last n tokens; k, v [len, kv_heads, d]: all from index
    `first` on. Window, chunk, softcap and sinks ([heads]) as in contracts.model.AttentionSpec."""
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    key = first + np.arange(len(k))[None, :]
    query = first + np.arange(len(k) - len(q), len(k))[:, None]
    visible = key <= query
    if window:
        visible &= key > query - window
    if chunk:
        visible &= key // chunk == query // chunk
    scores = np.where(visible[None], scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate((scores, column), -1)
    weights = softmax(scores)[..., : len(k)]
    return np.einsum("hqk,khd->qhd", weights, values).reshape(len(q), -1)


def moe_routing(logits: Array, bias: Array | None, spec: RoutingSpec) -> tuple[Array, Array]:
    """(ids, weights), best first."""
    scores = softmax(logits) if spec.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    ranking = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        grouped = ranking.reshape(len(logits), spec.num_groups, spec.num_experts // spec.num_groups)
        best = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        kept = np.argsort(-best, axis=-1)[:, : spec.top_k_groups]
        mask = np.zeros(best.shape, bool)
        np.put_along_axis(mask, kept, True, axis=-1)
        ranking = np.where(mask[..., None], grouped, -np.inf).reshape(ranking.shape)
    ids = np.argsort(-ranking, axis=-1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if spec.renormalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * spec.scaling_factor


def moe_experts(x: Array, ids: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """Weighted sum of the chosen experts."""
    out = np.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            out[token] += weight * (silu_and_mul(x[token] @ gate_up[expert].T) @ down[expert].T)
    return out


def apply_penalties(
    logits: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    output_counts: Array,
    prompt_seen: Array,
) -> Array:
    """Repetition first, then frequency and presence."""
    seen = (output_counts > 0) | prompt_seen
    factor = repetition[:, None]
    out = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    return out - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)


def bitmask(possible: Array) -> Array:
    """[B, V] bool to [B, ceil(V / 32)] int32."""
    rows, width = possible.shape
    padded = np.zeros((rows, -(-width // 32) * 32), bool)
    padded[:, :width] = possible
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32)


def filter_logits(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """-inf outside the kept set: min_p, then top_k, then top_p over what is left."""
    out = np.full_like(logits, -np.inf)
    for row, values in enumerate(logits):
        probability = softmax(values)
        keep = probability >= min_p[row] * probability.max()
        if 0 < top_k[row] < len(values):
            keep &= values >= np.sort(values)[-top_k[row]]
        if top_p[row] < 1:
            order = np.argsort(-values, kind="stable")
            mass = np.where(keep, probability, 0.0)[order] / probability[keep].sum()
            before = np.cumsum(mass) - mass
            needed = max(1, int((before < top_p[row]).sum()))
            keep &= values >= values[order[needed - 1]]
        out[row, keep] = values[keep]
    return out


def recurrence(
    spec: StateSpec,
    x: Array,
    dt: Array | None,
    beta: Array | None,
    *,
    conv: Array,
    conv_bias: Array,
    decay: Array | None,
    dt_bias: Array | None,
    skip: Array | None,
) -> Array:
    """One layer that keeps a state, over a whole sequence, token by token: the formulae of
    contracts.attention.StateBackend. [T, num_heads * value_dim], or [T, channels]."""
    width = spec.conv_width
    padded = np.concatenate((np.zeros((width - 1, x.shape[1])), x))
    convolved = np.stack(
        [(padded[t : t + width] * conv.T).sum(0) + conv_bias for t in range(len(x))]
    )
    if spec.kind == "short_conv":
        return convolved
    assert dt is not None and decay is not None and dt_bias is not None
    convolved /= 1 + np.exp(-convolved)
    parts = np.split(convolved, np.cumsum(spec.conv_parts)[:-1], 1)
    is_delta = spec.kind in ("delta", "channel_delta")
    q, k, v = parts if is_delta else parts[::-1]
    each = spec.num_heads // spec.num_key_heads
    q, k = (y.reshape(len(x), spec.num_key_heads, spec.key_dim).repeat(each, 1) for y in (q, k))
    v = v.reshape(len(x), spec.num_heads, spec.value_dim)
    step = np.log1p(np.exp(dt + dt_bias)).reshape(len(x), spec.num_heads, -1)
    state, out = np.zeros((spec.num_heads, spec.key_dim, spec.value_dim)), []
    if is_delta:
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        q = q * spec.key_dim**-0.5
    for t in range(len(x)):
        state = state * np.exp(decay[:, None] * step[t])[:, :, None]
        new = step[t][:, :1] * v[t]
        if beta is not None:
            seen = (state * k[t][:, :, None]).sum(1)
            new = (v[t] - seen) / (1 + np.exp(-beta[t]))[:, None]
        state = state + k[t][:, :, None] * new[:, None, :]
        o = (state * q[t][:, :, None]).sum(1)
        out.append(o if skip is None else o + skip[:, None] * v[t])
    return np.stack(out).reshape(len(x), -1)
