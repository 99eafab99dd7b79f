"""ernie-tiny in plain torch: the readable model that is trained and then exported.

It computes what `Ernie4_5_MoeForCausalLM` of transformers computes, plus the multi-token
prediction layer that transformers leaves out. Weights are kept in float32 and cast to the type of
the activations where they are used. All experts are computed for every token and the ones the
router did not choose are multiplied by zero: with eight small experts this costs less than
gathering the tokens of each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = BlockMask | Tensor
"""Which keys a query sees: a block mask on a GPU, a dense one elsewhere."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes, under the names config.json gives them."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    moe_num_experts: int = 8
    moe_k: int = 2
    moe_intermediate_size: int = 128
    moe_num_shared_experts: int = 1
    moe_layer_start_index: int = 1
    num_nextn_predict_layers: int = 1

    def to_json(self) -> dict[str, Any]:
        """The content of config.json (token ids are those `tokenizer.py` gives its specials)."""
        sizes = asdict(self)
        theta = sizes.pop("rope_theta")
        return {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            **sizes,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "use_bias": False,
            "use_cache": True,
            "moe_layer_end_index": self.num_hidden_layers - 1,
            "moe_layer_interval": 1,
            "moe_use_aux_free": True,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 4,
            "pad_token_id": 5,
            "torch_dtype": "bfloat16",
        }


class Linear(nn.Linear):
    """A linear map without bias whose float32 weight is cast to the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * scaled.to(x.dtype)


def rotation(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency: [rows, length, head_dim / 2]."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-steps / config.head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring pairs of features, as ERNIE does: x is [rows, heads, length, d]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """The gated feed-forward network of the dense layers and of the shared expert."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The routed experts, their weights stacked along the first dimension."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, inner, hidden = (
            config.moe_num_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate = F.linear(x, self.gate_proj.flatten(0, 1).to(x.dtype))
        up = F.linear(x, self.up_proj.flatten(0, 1).to(x.dtype))
        inner = (F.silu(gate) * up).unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]
        return inner.flatten(-2) @ self.down_proj.transpose(1, 2).flatten(0, 1).to(x.dtype)


class Moe(nn.Module):
    """A shared expert and the best `moe_k` of the routed ones.

    The correction bias takes part in choosing experts but not in weighing them; the training loop
    moves it so that all experts get the same load, which needs no auxiliary loss.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.moe_k
        self.gate = nn.Parameter(torch.empty(config.moe_num_experts, config.hidden_size))
        self.experts = Experts(config)
        self.shared_experts = Mlp(
            config.hidden_size, config.moe_intermediate_size * config.moe_num_shared_experts
        )
        self.register_buffer("correction_bias", torch.zeros(config.moe_num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.gate).softmax(-1)
        chosen = (scores + self.correction_bias).topk(self.k, dim=-1).indices
        used = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * used
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
        load = used.detach().flatten(0, -2).mean(0) / self.k
        return self.shared_experts(x) + self.experts(x, weights.to(x.dtype)), load


class Block(nn.Module):
    """One layer: attention, then a dense or a mixture-of-experts network."""

    def __init__(self, config: ModelConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else Moe(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out = self.mlp(self.post_attention_layernorm(x))
        out, load = out if isinstance(out, tuple) else (out, None)
        return x + out, load


class Output(NamedTuple):
    """What one pass gives: both predictions at every position and the load of the experts."""

    logits: Tensor
    mtp_logits: Tensor
    load: Tensor


class ErnieTiny(nn.Module):
    """The language model with its multi-token prediction layer."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, dense=at < config.moe_layer_start_index)
            for at in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mtp_emb_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mtp_hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mtp_linear_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.mtp_block = Block(config, dense=True)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens, in the type the layers compute in."""
        return F.embedding(tokens, self.embed_tokens.weight).to(self.compute_dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """The scores of all tokens; the head shares its weight with the embedding."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Output:
        """Predict the next token and the one after it, at every position.

        The multi-token prediction layer at position t reads the final normed hidden state of t
        and the embedding of token t + 1 (in this order: embedding, hidden), runs one dense block
        over them, shares the final norm and the head, and predicts token t + 2.
        """
        cos, sin = rotation(positions, self.config)
        x = self.embed(tokens)
        loads = []
        for layer in self.layers:
            x, load = layer(x, cos, sin, mask)
            if load is not None:
                loads.append(load)
        hidden = self.norm(x)
        following = self.embed(tokens.roll(-1, dims=1))
        joined = torch.cat((self.mtp_emb_norm(following), self.mtp_hidden_norm(hidden)), dim=-1)
        drafted, _ = self.mtp_block(self.mtp_linear_proj(joined), cos, sin, mask)
        return Output(self.head(hidden), self.head(self.norm(drafted)), torch.stack(loads))


def checkpoint_tensors(model: ErnieTiny) -> dict[str, Tensor]:
    """All weights under the names of the released ERNIE 4.5 checkpoints.

    Everything is bfloat16 except the router and its bias, which the family keeps in float32.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        for part in ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "mtp_block"):
            name = name.replace(f"{part}.", f"{part}.0.")
        name = f"model.{name}"
        if ".mlp.experts." in name:
            head, matrix = name.rsplit(".", 1)
            for at, expert in enumerate(value):
                tensors[f"{head}.{at}.{matrix}.weight"] = expert.to(torch.bfloat16).contiguous()
        elif name.endswith(".mlp.gate"):
            tensors[f"{name}.weight"] = value.float()
        elif name.endswith(".mlp.correction_bias"):
            bias = value.float().unsqueeze(0)
            tensors[name.replace("correction_bias", "moe_statics.e_score_correction_bias")] = bias
        else:
            tensors[name] = value.to(torch.bfloat16)
    return tensors


def load_checkpoint(model: ErnieTiny, tensors: dict[str, Tensor]) -> None:
    """Fill a model from the tensors that `checkpoint_tensors` wrote."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stored = f"model.{name}"
        for part in ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "mtp_block"):
            stored = stored.replace(f"{part}.", f"{part}.0.")
        if ".mlp.experts." in stored:
            head, matrix = stored.rsplit(".", 1)
            parts = [tensors[f"{head}.{at}.{matrix}.weight"] for at in range(len(value))]
            state[name] = torch.stack(parts).to(value.dtype)
        elif stored.endswith(".mlp.gate"):
            state[name] = tensors[f"{stored}.weight"]
        elif stored.endswith(".mlp.correction_bias"):
            bias = stored.replace("correction_bias", "moe_statics.e_score_correction_bias")
            state[name] = tensors[bias].squeeze(0)
        else:
            state[name] = tensors[stored].to(value.dtype)
    model.load_state_dict(state)
