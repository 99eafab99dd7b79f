"""A DFlash drafter in plain torch, as it is trained: the published layout.

A block is a known token and masks after it; one pass drafts the token of every mask where it
stands. Every layer attends from the block's tokens to all of them, and to keys and values that it
makes of g[t] = norm(fc(hidden states of the target at t)) for each t before the block. Embedding
and head are the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drafter import Mlp, Norm, turned


class Attention(nn.Module):
    """From a block to what lies before it and to itself."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.dim, eps = sizes["hidden_size"], sizes["head_dim"], sizes["rms_norm_eps"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.share = heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim, eps), Norm(self.dim, eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, before: Tensor, angles: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """x: [rows, tokens of blocks, hidden]; before: [rows, length, hidden]; angles: of the
        tokens of each. seen: [rows, 1, tokens, length + tokens]."""
        q = turned(self.q_norm(self._heads(self.q_proj(x))), angles[0])
        both = torch.cat((before, x), dim=1)
        k = turned(self.k_norm(self._heads(self.k_proj(both))), torch.cat(angles[::-1], dim=1))
        v = self._heads(self.v_proj(both))
        k, v = (part.repeat_interleave(self.share, dim=1) for part in (k, v))
        scores = (q @ k.mT * self.dim**-0.5).masked_fill(~seen, -1e9)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        self.input_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = Mlp(hidden, sizes["intermediate_size"])

    def forward(
        self, x: Tensor, before: Tensor, angles: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), before, angles, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(nn.Module):
    """All tensors of a checkpoint."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        reads = sizes["dflash_config"]["target_layer_ids"]
        self.theta, self.dim = sizes["rope_theta"], sizes["head_dim"]
        self.fc = nn.Linear(len(reads) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden, eps), Norm(hidden, eps)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["num_hidden_layers"]))

    def angles(self, positions: Tensor) -> Tensor:
        """[rows, length, dim / 2] of positions [rows, length]."""
        steps = torch.arange(0, self.dim, 2, device=positions.device) / self.dim
        return positions[..., None] * self.theta**-steps

    def forward(
        self, x: Tensor, states: Tensor, positions: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """What the head reads, of x: [rows, tokens of blocks, hidden], their embeddings. states:
        [rows, length, all hidden states that are read]; the others as Attention has them."""
        before = self.hidden_norm(self.fc(states))
        angles = (self.angles(positions[0]), self.angles(positions[1]))
        for layer in self.layers:
            x = layer(x, before, angles, seen)
        return self.norm(x)
