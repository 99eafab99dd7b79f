"""An EAGLE-3 drafter in plain torch, as it is trained: the published layout, one block.

At position t the drafter reads g[t] = fc(three hidden states of the target at t) and the embedding
of token t + 1, and predicts token t + 2. Its next draft reads its own hidden state a[t] in the
place of g[t + 1]. It is trained the way it is used (EAGLE-3, arXiv 2503.01840, "training-time
test"): pass j reads at position p what pass j - 1 gave at p - 1, and attends to the keys of pass 0
up to p - j, then to one key of each pass since.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each head's first half against its second. x: [rows, heads, length, dim]."""
    cos, sin = (f(angles)[:, None].repeat(1, 1, 1, 2) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections of the block's attention; its input is twice as wide as its output."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.dim = sizes["hidden_size"], sizes["head_dim"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.share = heads // kv_heads
        self.q_proj = nn.Linear(2 * hidden, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, hidden, bias=False)

    def heads(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every query head: [rows, heads, length, dim] each."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(self.share, dim=1) for part in (turned(k, angles), v))
        return turned(q, angles), k, v


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The parts of `midlayer`."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = Mlp(hidden, sizes["intermediate_size"])


class Past(NamedTuple):
    """Keys and values of the passes so far, [rows, heads, length, dim] each."""

    keys: list[Tensor]
    values: list[Tensor]


class Drafter(nn.Module):
    """All tensors of a checkpoint but the tables of its vocabulary."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        self.theta, self.dim = sizes["rope_theta"], sizes["head_dim"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Block(sizes)
        self.norm = Norm(hidden, sizes["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, sizes["draft_vocab_size"], bias=False)

    def angles(self, positions: Tensor) -> Tensor:
        """[rows, length, dim / 2] of positions [rows, length]."""
        steps = torch.arange(0, self.dim, 2, device=positions.device) / self.dim
        return positions[..., None] * self.theta**-steps

    def forward(
        self, embedded: Tensor, hidden: Tensor, angles: Tensor, seen: Tensor, past: Past
    ) -> tuple[Tensor, Tensor]:
        """Pass number len(past.keys), with everything where it stands: (logits, hidden states for
        the next pass). embedded, hidden: [rows, length, hidden]. seen: [rows, 1, length, length],
        whether a position sees another in pass 0."""
        block, attention, number = self.midlayer, self.midlayer.self_attn, len(past.keys)
        joined = torch.cat((block.input_layernorm(embedded), block.hidden_norm(hidden)), dim=-1)
        q, k, v = attention.heads(joined, angles)
        past.keys.append(k)
        past.values.append(v)
        scores = q @ past.keys[0].mT
        visible = seen
        if number:  # position p sees pass 0 up to p - number
            visible = F.pad(seen, (0, 0, number, 0))[:, :, : seen.shape[2]]
        scores = scores.masked_fill(~visible, -1e9)
        lags = range(number - 1, -1, -1)  # pass number - lag stands at p - lag
        ones = [past.keys[number - lag].roll(lag, dims=2) for lag in lags]
        own = [(q * one).sum(-1, keepdim=True) for one in ones]
        weights = (torch.cat([scores, *own], dim=-1) * self.dim**-0.5).softmax(-1)
        length = scores.shape[-1]
        mixed = weights[..., :length] @ past.values[0]
        for place, lag in enumerate(lags):
            value = past.values[number - lag].roll(lag, dims=2)
            mixed = mixed + weights[..., length + place, None] * value
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(-2))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden
