"""GGUF tensor names and checkpoint names: which tensor of the file fills which weight of the model.

Both sides store the same matrices as [out, in], with three differences: the experts of a block lie
in one tensor, Llama's query and key rows are in another order, and the up-projection of latent
attention is split into its key half (transposed) and its value half.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import WeightError

from .reader import GGUFModel, GGUFTensor

logger = logging.getLogger(__name__)

_WHOLE: Final[dict[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXPERTS: Final[dict[str, str]] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_CORRECTION: Final[dict[str, str]] = {  # by architecture of the file
    "ernie4_5-moe": "mlp.moe_statics.e_score_correction_bias",
    "deepseek2": "mlp.gate.e_score_correction_bias",
}
ROPE_FACTORS: Final = "rope_freqs.weight"  # read into the settings
_NUMBER: Final = re.compile(r"^blk\.(\d{1,9})\.")
_NAME: Final = re.compile(r"^(?:blk\.(\d+)\.)?([a-z_0-9]+)\.(weight|bias)$")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The place of a weight: rows of one tensor, from `first_row` on or in the order of `order`
    (for a vector: its numbers).

    `up`: the value half of an up-projection whose key half is `tensor`.
    """

    name: str  # name in the checkpoint
    shape: tuple[int, ...]
    tensor: GGUFTensor
    first_row: int = 0
    order: np.ndarray | None = None
    up: GGUFTensor | None = None


def sources(model: GGUFModel, hf_config: dict[str, Any]) -> Iterator[Source]:
    """Every weight of the model; unknown tensors keep their own name. Blocks after the last, which
    predict further tokens, are left out."""
    architecture = str(model.settings.get("general.architecture"))
    left_out = 0
    for name, tensor in model.tensors.items():
        numbered = _NUMBER.match(name)
        if numbered and int(numbered[1]) >= hf_config["num_hidden_layers"]:
            left_out += 1
            continue
        match = _NAME.match(name)
        block, part, suffix = match.groups() if match else (None, "", "")
        if block is None:
            if name != ROPE_FACTORS:
                known = f"{_WHOLE[part]}.{suffix}" if part in _WHOLE else name
                yield Source(known, tensor.shape, tensor)
            continue
        prefix = f"model.layers.{block}"
        if part in _EXPERTS and len(tensor.shape) == 3:
            yield from _experts(f"{prefix}.mlp.experts", _EXPERTS[part], tensor)
        elif part == "exp_probs_b" and architecture in _CORRECTION:
            shape = (1, *tensor.shape) if architecture == "ernie4_5-moe" else tensor.shape
            yield Source(f"{prefix}.{_CORRECTION[architecture]}", shape, tensor)
        elif part == "attn_k_b":
            yield _up_projection(model, f"{prefix}.self_attn.kv_b_proj.weight", block, tensor)
        elif part == "attn_v_b":
            continue  # with attn_k_b
        elif part in _BLOCK:
            known = f"{prefix}.{_BLOCK[part]}.{suffix}"
            order = None
            if architecture == "llama" and part in ("attn_q", "attn_k"):
                order = _half_order(tensor, hf_config, part)
            yield Source(known, tensor.shape, tensor, order=order)
        else:
            yield Source(name, tensor.shape, tensor)
    if left_out:
        logger.info(
            "%s: %d tensors of blocks after the last are not read (drafts need a checkpoint of "
            "their own)",
            model.path,
            left_out,
        )


def _experts(prefix: str, part: str, tensor: GGUFTensor) -> Iterator[Source]:
    count, rows, columns = tensor.shape
    for expert in range(count):
        name = f"{prefix}.{expert}.{part}.weight"
        yield Source(name, (rows, columns), tensor, first_row=expert * rows)


def _half_order(tensor: GGUFTensor, hf_config: dict[str, Any], part: str) -> np.ndarray | None:
    """Llama's rows are stored as rotated pairs (0, 1), (2, 3), ...; checkpoints have (0, R/2), (1,
    R/2 + 1)."""
    heads = hf_config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    if tensor.shape[0] % (2 * heads):
        raise WeightError(
            f"{tensor.file.path}: tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads"
        )
    rows = np.arange(tensor.shape[0])
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _up_projection(model: GGUFModel, name: str, block: str, key: GGUFTensor) -> Source:
    value = model.tensors.get(f"blk.{block}.attn_v_b.weight")
    if value is None:
        raise WeightError(
            f"{model.path}: tensor {key.name} comes without blk.{block}.attn_v_b.weight"
        )
    is_pair = len(key.shape) == len(value.shape) == 3
    if not is_pair or (key.shape[0], key.shape[1]) != (value.shape[0], value.shape[2]):
        raise WeightError(
            f"{model.path}: tensors {key.name} {list(key.shape)} and {value.name} "
            f"{list(value.shape)} are not the halves of one projection; expected [heads, rank, a] "
            "and [heads, b, rank]"
        )
    heads, rank, nope = key.shape
    return Source(name, (heads * (nope + value.shape[1]), rank), key, up=value)
