"""EAGLE-3 in torch float64, from the published layout and nothing of ours; and random checkpoints
in its spellings, for random targets of transformers.

The layout is what SafeAILab's, SpecForge's and Speculators' releases hold: `fc` joins three hidden
states, `midlayer` (or `layers.0`) attends to [norm(embedding); norm(hidden)], and `d2t` holds how
far each id of the draft's vocabulary lies below the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, NUM_LAYERS, DRAFT_VOCAB = 67, 32, 8, 40
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
# Which hidden states a layout reads: number n is what block n, counted from 0, is given.
READS = {"safeai": (2, 4, 5), "speculators": (1, 3, 6), "specforge": (1, 4, 7)}


def save_target(folder: Path, family: str) -> Any:
    """A random model of transformers, saved; in float32."""
    import transformers

    torch.manual_seed(3)
    common = {
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")},
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    more: dict[str, Any] = {}
    if family == "Qwen3":
        more = {"head_dim": 16}
    if family == "Ernie4_5_Moe":
        more = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    config = getattr(transformers, f"{family}Config")(**common, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def save_draft(folder: Path, layout: str) -> dict[str, Tensor]:
    """A random checkpoint in this spelling; returns its weights in float64 under the first one's
    names."""
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int, around: float = 0.0) -> Tensor:
        return around + 0.2 * torch.randn(shape, generator=generator)

    dim, heads, kv_heads = (
        SIZES[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    width, vocab = SIZES["intermediate_size"], VOCAB if layout == "specforge" else DRAFT_VOCAB
    weights = {
        "fc.weight": noise(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": noise(heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": noise(kv_heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": noise(kv_heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": noise(HIDDEN, heads * dim),
        "midlayer.mlp.gate_proj.weight": noise(width, HIDDEN),
        "midlayer.mlp.up_proj.weight": noise(width, HIDDEN),
        "midlayer.mlp.down_proj.weight": noise(HIDDEN, width),
        "norm.weight": noise(HIDDEN, around=1.0),
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = noise(HIDDEN, around=1.0)
    config: dict[str, Any] = {"torch_dtype": "float32"}
    if layout != "specforge":
        ids = torch.randperm(VOCAB, generator=generator)[:vocab].sort().values
        weights["d2t"] = ids - torch.arange(vocab)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        weights["lm_head.weight"] = noise(vocab, HIDDEN)
        config["draft_vocab_size"] = vocab
    stored = dict(weights)
    if layout == "safeai":
        config |= {**SIZES, "architectures": ["LlamaForCausalLMEagle3"]}
    elif layout == "speculators":
        stored["embed_tokens.weight"] = weights["embed_tokens.weight"] = noise(VOCAB, HIDDEN)
        stored = {name.replace("midlayer.", "layers.0."): w for name, w in stored.items()}
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": SIZES,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(READS[layout]),
        }
    else:
        stored = {f"model.{name}": w for name, w in stored.items()}
        before = [number - 1 for number in READS[layout]]
        own = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": before}
        config |= {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: w.contiguous() for name, w in stored.items()}, folder / "model.safetensors")
    return {name: w.double() if w.is_floating_point() else w for name, w in weights.items()}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float, first: int = 0) -> Tensor:
    """x [n, heads, dim] at positions first..first+n-1: element i turns against i + dim / 2."""
    half = x.shape[-1] // 2
    angle = (first + torch.arange(x.shape[0]))[:, None] * theta ** (
        -torch.arange(half).double() / half
    )
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def run(
    sizes: Mapping[str, Any], w: Mapping[str, Tensor], embedded: Tensor, g: Tensor, after: bool
) -> tuple[Tensor, Tensor]:
    """(what the head reads, hidden states for the next draft) of positions 0..n-1, [n, hidden]
    each. after: the residual stream begins after the norm."""
    eps, dim = sizes["rms_norm_eps"], sizes["head_dim"]
    normed = norm(g, w["midlayer.hidden_norm.weight"], eps)
    x = torch.cat((norm(embedded, w["midlayer.input_layernorm.weight"], eps), normed), -1)
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, dim))
        for part in "qkv"
    )
    q, k = rotate(q, sizes["rope_theta"]), rotate(k, sizes["rope_theta"])
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
    y = (normed if after else g) + mixed.flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
    z = norm(y, w["midlayer.post_attention_layernorm.weight"], eps)
    gate, up, down = (w[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    a = y + (F.silu(z @ gate.T) * (z @ up.T)) @ down.T
    return norm(a, w["norm.weight"], eps), a


class Oracle:
    """A target of transformers and a draft beside it."""

    def __init__(
        self, target: Any, weights: Mapping[str, Tensor], sizes: Mapping[str, Any],
        reads: Sequence[int], *, after: bool = False,
    ) -> None:  # fmt: skip
        self.target, self._weights, self._sizes = target, weights, sizes
        self._reads, self._after = reads, after
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        self._embedding = weights.get("embed_tokens.weight", embedding.weight.double())
        self._head = weights.get("lm_head.weight", head.weight.double())

    def _states(self, fed: Tensor) -> list[Tensor]:
        """What the blocks before each number return of these tokens, [n, hidden] each."""
        found: dict[int, Tensor] = {}

        def keep(number: int) -> Any:
            def hook(block: Any, given: Any, output: Any) -> None:
                found[number] = (output[0] if isinstance(output, tuple) else output).reshape(
                    fed.shape[1], -1
                )

            return hook

        blocks = self.target.model.layers
        hooks = [blocks[n - 1].register_forward_hook(keep(n)) for n in self._reads]
        self.target(fed)
        for hook in hooks:
            hook.remove()
        return [found[number] for number in self._reads]

    def _of_the_target(self, logits: Tensor) -> Tensor:
        """[..., vocabulary of the draft] to that of the target."""
        if "d2t" not in self._weights:
            return logits
        ids = torch.arange(logits.shape[-1]) + self._weights["d2t"]
        shape = (*logits.shape[:-1], len(self._embedding))
        return torch.full(shape, -torch.inf, dtype=logits.dtype).index_copy(-1, ids, logits)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
        """Logits over the target's vocabulary [count, vocabulary] and the likeliest drafts after
        `tokens`, of which the target has not computed the last."""
        fed = torch.tensor([list(tokens[:-1])])
        g = torch.cat(self._states(fed), -1).double()
        g = g @ self._weights["fc.weight"].T
        drafts: list[int] = []
        rows = []
        for _ in range(count):
            embedded = self._embedding[torch.tensor([*tokens[1:], *drafts])]
            read, a = run(self._sizes, self._weights, embedded, g, self._after)
            logits = self._of_the_target(read[-1] @ self._head.T)
            rows.append(logits)
            drafts.append(int(logits.argmax()))
            g = torch.cat((g, a[-1:]))
        return torch.stack(rows), drafts
