"""DFlash in torch float64, from the published layout and nothing of ours; and random checkpoints in
its spellings.

The layout is what z-lab's and Speculators' releases hold: `fc` and `hidden_norm` join hidden states
of the target, `layers` are a Qwen3 model's, whose keys and values are made of these states and of a
block: the newest token and masks after it, which see each other.
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

from tests.plugins import eagle_oracle
from tests.plugins.eagle_oracle import DRAFT_VOCAB, HIDDEN, VOCAB, norm, rotate

BLOCK_SIZE, MASK, NUM_LAYERS = 6, 66, 2
SIZES: dict[str, Any] = {
    **eagle_oracle.SIZES,
    "model_type": "qwen3",
    "num_hidden_layers": NUM_LAYERS,
    "tie_word_embeddings": True,  # as the target's config.json says, of nothing that is stored
}
# Which hidden states a layout reads: number n is what n blocks return.
READS = {"z-lab": (2, 4, 7), "speculators": (1, 6)}


def save_draft(folder: Path, layout: str) -> dict[str, Tensor]:
    """A random checkpoint in this spelling; returns its weights in float64."""
    generator = torch.Generator().manual_seed(12)

    def noise(*shape: int, around: float = 0.0) -> Tensor:
        return around + 0.2 * torch.randn(shape, generator=generator)

    dim, heads, kv_heads = (
        SIZES[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    width = SIZES["intermediate_size"]
    weights = {
        "fc.weight": noise(HIDDEN, len(READS[layout]) * HIDDEN),
        "hidden_norm.weight": noise(HIDDEN, around=1.0),
        "norm.weight": noise(HIDDEN, around=1.0),
    }
    for number in range(NUM_LAYERS):
        layer = f"layers.{number}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": noise(heads * dim, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": noise(kv_heads * dim, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": noise(kv_heads * dim, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": noise(HIDDEN, heads * dim),
            f"{layer}.self_attn.q_norm.weight": noise(dim, around=1.0),
            f"{layer}.self_attn.k_norm.weight": noise(dim, around=1.0),
            f"{layer}.mlp.gate_proj.weight": noise(width, HIDDEN),
            f"{layer}.mlp.up_proj.weight": noise(width, HIDDEN),
            f"{layer}.mlp.down_proj.weight": noise(HIDDEN, width),
            f"{layer}.input_layernorm.weight": noise(HIDDEN, around=1.0),
            f"{layer}.post_attention_layernorm.weight": noise(HIDDEN, around=1.0),
        }
    config: dict[str, Any] = {"torch_dtype": "float32", "block_size": BLOCK_SIZE}
    if layout == "z-lab":
        own = {"mask_token_id": MASK, "target_layer_ids": [n - 1 for n in READS[layout]]}
        config |= {**SIZES, "architectures": ["DFlashDraftModel"], "dflash_config": own}
        config["layer_types"] = ["full_attention"] * NUM_LAYERS
    else:
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        weights["lm_head.weight"] = noise(DRAFT_VOCAB, HIDDEN)
        weights["embed_tokens.weight"] = noise(VOCAB, HIDDEN)
        config |= {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": {**SIZES, "tie_word_embeddings": False},
            "draft_vocab_size": DRAFT_VOCAB,
            "aux_hidden_state_layer_ids": list(READS[layout]),
            "mask_token_id": MASK,
            "fusion_type": "linear",
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return {name: w.double() if w.is_floating_point() else w for name, w in weights.items()}


def run(sizes: Mapping[str, Any], w: Mapping[str, Tensor], x: Tensor, g: Tensor) -> Tensor:
    """What the head reads of a block x [size, hidden] after states g [n, hidden]."""
    eps, dim, theta = sizes["rms_norm_eps"], sizes["head_dim"], sizes["rope_theta"]
    g = norm(g, w["hidden_norm.weight"], eps)
    for number in range(sizes["num_hidden_layers"]):
        of = {n.removeprefix(f"layers.{number}."): t for n, t in w.items()}
        normed = norm(x, of["input_layernorm.weight"], eps)
        both = torch.cat((g, normed))
        q, k, v = (
            (y @ of[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, dim))
            for part, y in (("q", normed), ("k", both), ("v", both))
        )
        q = rotate(norm(q, of["self_attn.q_norm.weight"], eps), theta, first=len(g))
        k = rotate(norm(k, of["self_attn.k_norm.weight"], eps), theta)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        x = x + mixed.flatten(1) @ of["self_attn.o_proj.weight"].T
        z = norm(x, of["post_attention_layernorm.weight"], eps)
        gate, up, down = (of[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(z @ gate.T) * (z @ up.T)) @ down.T
    return norm(x, w["norm.weight"], eps)


class Oracle(eagle_oracle.Oracle):
    """A target of transformers and a draft beside it. mask: the token that stands for a draft."""

    def __init__(
        self, target: Any, weights: Mapping[str, Tensor], sizes: Mapping[str, Any],
        reads: Sequence[int], mask: int = MASK,
    ) -> None:  # fmt: skip
        super().__init__(target, weights, sizes, reads)
        self._mask = mask

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
        """As of EAGLE-3, by a block of 1 + count tokens."""
        g = torch.cat(self._states(torch.tensor([list(tokens[:-1])])), -1).double()
        block = torch.tensor([tokens[-1], *[self._mask] * count])
        read = run(
            self._sizes, self._weights, self._embedding[block], g @ self._weights["fc.weight"].T
        )
        logits = self._of_the_target(read[1:] @ self._head.T)
        return logits, logits.argmax(-1).tolist()
