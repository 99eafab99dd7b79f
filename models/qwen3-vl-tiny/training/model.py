"""qwen3-vl-tiny in plain torch: the readable model that is trained and then exported.

It computes what `Qwen3VLForConditionalGeneration` of transformers computes for pictures. All
pictures of a call have the same size, so that the tower is a few large operations. Weights are
float32; a caller that wants bfloat16 uses autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, MERGE = 16, 2
CELL = PATCH * MERGE  # pixels of a side that become one vector


@dataclass(frozen=True)
class Sizes:
    """The sizes, and what config.json calls them."""

    vocabulary: int = 512
    hidden: int = 192
    wide: int = 448
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    sections: tuple[int, int, int] = (12, 10, 10)
    theta: float = 10000.0
    eps: float = 1e-6
    vision_hidden: int = 128
    vision_wide: int = 448
    vision_layers: int = 6
    vision_heads: int = 4
    positions: int = 144
    taps: tuple[int, ...] = (2,)

    def to_json(self, ids: dict[str, int]) -> dict[str, Any]:
        """The content of config.json. ids: of the tokens that it names."""
        parameters = {
            "rope_type": "default", "rope_theta": self.theta, "mrope_interleaved": True,
            "mrope_section": list(self.sections),
        }  # fmt: skip
        text = {
            "model_type": "qwen3_vl_text", "vocab_size": self.vocabulary,
            "hidden_size": self.hidden, "intermediate_size": self.wide,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head,
            "max_position_embeddings": 4096, "rms_norm_eps": self.eps, "hidden_act": "silu",
            "attention_bias": False, "rope_theta": self.theta, "rope_parameters": parameters,
            "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": ids["eos_token_id"],
        }  # fmt: skip
        vision = {
            "model_type": "qwen3_vl", "depth": self.vision_layers,
            "hidden_size": self.vision_hidden, "intermediate_size": self.vision_wide,
            "num_heads": self.vision_heads, "in_channels": 3, "patch_size": PATCH,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": self.hidden,
            "num_position_embeddings": self.positions, "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": list(self.taps),
        }  # fmt: skip
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            **ids,
        }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head; x: [..., head], cos, sin: [..., head / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Norm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


@cache
def _grid(rows: int, columns: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each patch, cell by cell: [patches, 2] row and column, and [patches, side * side] how much
    of each vector of the table of positions it has (bilinear, corners aligned)."""
    cells = torch.cartesian_prod(
        torch.arange(rows // MERGE), torch.arange(columns // MERGE),
        torch.arange(MERGE), torch.arange(MERGE),
    )  # fmt: skip
    places = cells[:, :2] * MERGE + cells[:, 2:]
    axes = []
    for axis, count in enumerate((rows, columns)):
        at = places[:, axis] * (side - 1) / max(1, count - 1)
        axes.append((1 - (at[:, None] - torch.arange(side)).abs()).clamp(min=0))
    shares = (axes[0][:, :, None] * axes[1][:, None, :]).flatten(1)
    return places.to(device), shares.to(device)


class VisionBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, hidden = s.vision_heads, s.vision_hidden
        self.norm1, self.norm2 = nn.LayerNorm(hidden, 1e-6), nn.LayerNorm(hidden, 1e-6)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)}
        )
        self.mlp = nn.ModuleDict(
            {
                "linear_fc1": nn.Linear(hidden, s.vision_wide),
                "linear_fc2": nn.Linear(s.vision_wide, hidden),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [pictures, patches, hidden]; so is the result."""
        count, patches, hidden = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).view(count, patches, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(count, patches, hidden))
        wide = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](wide)


class Merger(nn.Module):
    """Four patches to one vector of the decoder. is_deep: of DeepStack, whose norm is of all
    four."""

    def __init__(self, s: Sizes, *, is_deep: bool) -> None:
        super().__init__()
        self.cell = s.vision_hidden * MERGE**2
        self.norm = nn.LayerNorm(self.cell if is_deep else s.vision_hidden, 1e-6)
        self.is_deep = is_deep
        self.linear_fc1 = nn.Linear(self.cell, self.cell)
        self.linear_fc2 = nn.Linear(self.cell, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, patches, hidden] to [pictures * cells, hidden of the decoder]."""
        x = x if self.is_deep else self.norm(x)
        x = x.reshape(-1, self.cell)
        x = self.norm(x) if self.is_deep else x
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Vision(nn.Module):
    """The tower. A still picture stands for both frames of a patch, so that the patch embedding is
    a product with the sum of the weights of both; half of that sum is exported for each."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(3 * PATCH**2, s.vision_hidden)})
        self.pos_embed = nn.Embedding(s.positions, s.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(s) for _ in range(s.vision_layers))
        self.merger = Merger(s, is_deep=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(s, is_deep=True) for _ in s.taps)

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """pictures: [n, height, width, 3] uint8. The vectors, [n * cells, hidden], and those that
        are added after the first layers of the decoder."""
        count, height, width, _ = pictures.shape
        rows, columns = height // PATCH, width // PATCH
        split = pictures.view(count, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
        patches = split.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, rows * columns, -1)
        side = int(self.sizes.positions**0.5)
        places, shares = _grid(rows, columns, side, pictures.device)
        x = self.patch_embed["proj"](patches.float() / 127.5 - 1)
        x = x.float() + (shares @ self.pos_embed.weight).float()
        head = self.sizes.vision_hidden // self.sizes.vision_heads
        steps = torch.arange(0, head // 2, 2, device=x.device) / (head // 2)
        angles = (places[:, :, None] * 10000.0**-steps).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        levels = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if number in self.sizes.taps:
                merge = self.deepstack_merger_list[self.sizes.taps.index(number)]
                levels.append(merge(x))
        return [self.merger(x), *levels]


class Layer(nn.Module):
    """One layer of the decoder: Qwen3's."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(s.hidden, s.heads * s.head),
                "k_proj": linear(s.hidden, s.kv_heads * s.head),
                "v_proj": linear(s.hidden, s.kv_heads * s.head),
                "o_proj": linear(s.heads * s.head, s.hidden),
                "q_norm": Norm(s.head, s.eps),
                "k_norm": Norm(s.head, s.eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(s.hidden, s.wide),
                "up_proj": linear(s.hidden, s.wide),
                "down_proj": linear(s.wide, s.hidden),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [rows, tokens, hidden]; so is the result."""
        s, (rows, tokens, _) = self.sizes, x.shape
        normed, attn = self.input_layernorm(x), self.self_attn
        q, k, v = (
            attn[f"{name}_proj"](normed).view(rows, tokens, -1, s.head) for name in ("q", "k", "v")
        )
        q, k = rotate(attn["q_norm"](q), cos, sin), rotate(attn["k_norm"](k), cos, sin)
        q, k, v = (
            y.to(v.dtype).repeat_interleave(s.heads // y.shape[2], 2).transpose(1, 2)
            for y in (q, k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attn["o_proj"](mixed.transpose(1, 2).reshape(rows, tokens, -1))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x + self.mlp["down_proj"](gated)


class Model(nn.Module):
    """Tower, decoder and the head, which is the embedding."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.visual = Vision(s)
        self.language_model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(s.vocabulary, s.hidden),
                "layers": nn.ModuleList(Layer(s) for _ in range(s.layers)),
                "norm": Norm(s.hidden, s.eps),
            }
        )
        # Frequency n belongs to the axis of time, rows or columns.
        axis = torch.zeros(s.head // 2, dtype=torch.long)
        axis[1 : 3 * s.sections[1] : 3], axis[2 : 3 * s.sections[2] : 3] = 1, 2
        steps = torch.arange(0, s.head, 2) / s.head
        self.register_buffer("axis", axis, persistent=False)
        self.register_buffer("frequencies", s.theta**-steps, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 if "embed" in name else weight.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, positions: Tensor, pictures: Tensor, where: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary]. positions: [3, rows, tokens]; where: the place of each
        vector of the pictures among rows * tokens."""
        text = self.language_model
        x = text["embed_tokens"](tokens).float()
        vectors, *levels = [v.float() for v in self.visual(pictures)]
        x = x.flatten(0, 1).index_copy(0, where, vectors).view(x.shape)
        angles = positions[self.axis].movedim(0, -1) * self.frequencies
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        for number, layer in enumerate(text["layers"]):
            x = layer(x, cos, sin)
            if number < len(levels):
                x = x.flatten(0, 1).index_add(0, where, levels[number]).view(x.shape)
        return F.linear(text["norm"](x), text["embed_tokens"].weight)


def load_checkpoint(model: Model, tensors: dict[str, Tensor]) -> None:
    """Fill the model with what `checkpoint_tensors` made of one."""
    found = {}
    for name, tensor in model.state_dict().items():
        stored = tensors[f"model.{name}"].to(tensor.dtype)
        if name == "visual.patch_embed.proj.weight":
            stored = stored.sum(2).reshape(tensor.shape)  # a half for each of two frames
        found[name] = stored
    model.load_state_dict(found)


def checkpoint_tensors(model: Model) -> dict[str, Tensor]:
    """The weights under the names and in the shapes of released checkpoints, bfloat16."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "visual.patch_embed.proj.weight":
            half = tensor.view(-1, 3, 1, PATCH, PATCH) / 2
            tensor = half.expand(-1, 3, 2, PATCH, PATCH)
        found[f"model.{name}"] = tensor.to("cpu", torch.bfloat16).contiguous()
    return found
