"""Multi-token-prediction modules in numpy float64, from the papers' formulas and nothing of ours.

DeepSeek V3: arXiv 2412.19437, sections 2.1 (latent attention, here expanded to keys and values of
every head; routing) and 2.2 (the module). ERNIE 4.5: grouped-query attention and a dense block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
Config = Mapping[str, Any]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: np.ndarray, base: float) -> np.ndarray:
    """x [n, heads, dim] at positions 0..n-1: pairs (0, 1), (2, 3), ... as complex numbers."""
    n, _, dim = x.shape
    angle = np.arange(n)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None, :]
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """[n, heads, d] each, as many key heads as query heads; causal; [n, heads * d of v]."""
    n = q.shape[0]
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    return np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(n, -1)


def feed_forward(x: np.ndarray, w: Weights, prefix: str) -> np.ndarray:
    gate, up = x @ w[f"{prefix}.gate_proj.weight"].T, x @ w[f"{prefix}.up_proj.weight"].T
    return (silu(gate) * up) @ w[f"{prefix}.down_proj.weight"].T


def ernie_attention(x: np.ndarray, w: Weights, prefix: str, c: Config) -> np.ndarray:
    n, heads, kv_heads = x.shape[0], c["num_attention_heads"], c["num_key_value_heads"]
    q, k, v = (x @ w[f"{prefix}.{p}_proj.weight"].T for p in "qkv")
    q, k, v = (m.reshape(n, h, -1) for m, h in ((q, heads), (k, kv_heads), (v, kv_heads)))
    q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
    k, v = (np.repeat(m, heads // kv_heads, axis=1) for m in (k, v))
    return attend(q, k, v, q.shape[-1] ** -0.5) @ w[f"{prefix}.o_proj.weight"].T


def deepseek_attention(x: np.ndarray, w: Weights, prefix: str, c: Config) -> np.ndarray:
    n, heads, eps = x.shape[0], c["num_attention_heads"], 1e-6
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    down = norm(x @ w[f"{prefix}.q_a_proj.weight"].T, w[f"{prefix}.q_a_layernorm.weight"], eps)
    q = (down @ w[f"{prefix}.q_b_proj.weight"].T).reshape(n, heads, nope + rope)
    latent = x @ w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    k_rope = rotate(latent[:, None, c["kv_lora_rank"] :], c["rope_theta"])
    latent = norm(latent[:, : c["kv_lora_rank"]], w[f"{prefix}.kv_a_layernorm.weight"], eps)
    up = (latent @ w[f"{prefix}.kv_b_proj.weight"].T).reshape(n, heads, nope + v_dim)
    k = np.concatenate((up[..., :nope], np.broadcast_to(k_rope, (n, heads, rope))), -1)
    q = np.concatenate((q[..., :nope], rotate(q[..., nope:], c["rope_theta"])), -1)
    out = attend(q, k, up[..., nope:], (nope + rope) ** -0.5)
    return out @ w[f"{prefix}.o_proj.weight"].T


def deepseek_experts(x: np.ndarray, w: Weights, prefix: str, c: Config) -> np.ndarray:
    """Sigmoid affinities; groups by the sum of their two best, biased; weights from unbiased
    ones."""
    affinity = 1 / (1 + np.exp(-(x @ w[f"{prefix}.gate.weight"].T)))
    biased = affinity + w[f"{prefix}.gate.e_score_correction_bias"]
    y = feed_forward(x, w, f"{prefix}.shared_experts")
    per_group = c["n_routed_experts"] // c["n_group"]
    for t in range(x.shape[0]):
        groups = biased[t].reshape(c["n_group"], per_group)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: c["topk_group"]]
        allowed = [e for g in best for e in range(g * per_group, (g + 1) * per_group)]
        chosen = sorted(allowed, key=lambda e: -biased[t, e])[: c["num_experts_per_tok"]]
        weights = affinity[t, chosen] / affinity[t, chosen].sum() * c["routed_scaling_factor"]
        for expert, weight in zip(chosen, weights, strict=True):
            y[t] += weight * feed_forward(x[t : t + 1], w, f"{prefix}.experts.{expert}")[0]
    return y


Parts = tuple[
    str, str, str, str, str, str, str, Callable[..., np.ndarray], Callable[..., np.ndarray]
]


def parts(family: str, c: Config, module: int) -> Parts:
    """Names of embedding, both norms, projection, block, last norm and head; attention and MLP."""
    if family == "ernie":
        names = [f"model.mtp_{p}.{module}" for p in ("emb_norm", "hidden_norm", "linear_proj")]
        block, dense = (
            f"model.mtp_block.{module}",
            lambda x, w, prefix, c: feed_forward(x, w, prefix),
        )
        return (
            "model.embed_tokens", *names, block, "model.norm", "model.embed_tokens",
            ernie_attention, dense,
        )  # fmt: skip
    base = f"model.layers.{c['num_hidden_layers'] + module}"
    return (
        f"{base}.embed_tokens", f"{base}.enorm", f"{base}.hnorm", f"{base}.eh_proj", base,
        f"{base}.shared_head.norm", f"{base}.shared_head.head",
        deepseek_attention, deepseek_experts,
    )  # fmt: skip


def run(
    family: str, c: Config, w: Weights, module: int, tokens: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(logits, new hidden states) of a whole sequence: tokens[t] is the one `module + 1` after
    t."""
    table, emb, hid, proj, block, last, head, attention, mlp = parts(family, c, module)
    eps = c["rms_norm_eps"]
    embedded = norm(w[f"{table}.weight"][tokens], w[f"{emb}.weight"], eps)
    joined = np.concatenate((embedded, norm(hidden, w[f"{hid}.weight"], eps)), -1)
    x = joined @ w[f"{proj}.weight"].T
    x = x + attention(
        norm(x, w[f"{block}.input_layernorm.weight"], eps), w, f"{block}.self_attn", c
    )
    x = x + mlp(norm(x, w[f"{block}.post_attention_layernorm.weight"], eps), w, f"{block}.mlp", c)
    new = norm(x, w[f"{last}.weight"], eps)
    return new @ w[f"{head}.weight"].T, new
