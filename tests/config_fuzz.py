"""Random configurations of every text architecture, as transformers saves them, against the same
model here: equal logits and tokens, or a refusal that names a field of config.json.

    python -m tests.config_fuzz --library torch --seeds 0:40 [--only Qwen3Next] [--keep FOLDER]

A child process with torch makes the checkpoints (see tests/checkpoints.py); tests/cpu has a small
part of this in the usual run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

NUM_GREEDY = 12
LENGTHS = (5, 23)
TOLERANCE = 1e-4  # of the largest logit
Fields = dict[str, Any]


_BOTH = (True, False)
KINDS = ("default", "default", "linear", "dynamic", "yarn", "llama3", "longrope")


class Draw(random.Random):
    """Random fields of config.json."""

    def maybe(self, chance: float = 0.5) -> bool:
        """True that often."""
        return self.random() < chance

    def some(self, **possible: tuple[Any, ...]) -> Fields:
        """Half of these fields, the others as transformers has them."""
        return {key: self.choice(values) for key, values in possible.items() if self.maybe()}

    def common(self) -> Fields:
        """Sizes that every family has."""
        return {
            "vocab_size": self.choice((97, 128, 131, 200)),
            "hidden_size": self.choice((24, 48, 72)),
            "intermediate_size": self.choice((24, 40, 64)),
            "num_hidden_layers": self.randint(2, 5),
            "max_position_embeddings": self.choice((64, 100, 256, 512)),
            **self.some(rms_norm_eps=(1e-6, 1e-5, 1e-3), tie_word_embeddings=_BOTH),
            **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        }

    def heads(self, *, explicit: float = 0.5) -> Fields:
        """1 to 8 queries for each of 1 to 8 key heads; a width of their own that often, or the
        hidden size divided among them."""
        kv = self.choice((1, 1, 2, 2, 3, 4, 8))
        heads = kv * self.choice([n for n in (1, 2, 3, 4, 8) if kv * n <= 8])
        counts = {"num_attention_heads": heads, "num_key_value_heads": kv}
        dim = self.choice((8, 12, 16, 20))
        if self.maybe(explicit):
            return {**counts, "head_dim": dim}
        return {**counts, "hidden_size": heads * dim}

    def rope(self, fields: Fields, *kinds: str, share: bool = False) -> Fields:
        """rope_parameters of one of these kinds, with those of its fields that checkpoints have."""
        dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
        dim = dim or fields["hidden_size"] // fields["num_attention_heads"]
        kind, longest = self.choice(kinds or KINDS), fields["max_position_embeddings"]
        rule: Fields = {"rope_type": kind, "rope_theta": self.choice((1e4, 5e5, 1e6))}
        if share:
            whole = [s for s in (0.25, 0.5, 0.75, 1.0) if dim * s in range(4, dim + 1, 2)]
            rule["partial_rotary_factor"] = self.choice(whole)
            dim = int(dim * rule["partial_rotary_factor"])
        factor, original = self.choice((2.0, 4.0, 8.0, 40.0)), self.choice((16, 32, 64))
        if kind in ("linear", "dynamic"):
            rule["factor"] = factor
        elif kind == "yarn":
            rule |= {"factor": factor, "original_max_position_embeddings": original}
            rule |= self.some(
                beta_fast=(32, 32.0, 4),
                beta_slow=(1, 1.0, 0.5),
                truncate=(True, False),
                attention_factor=(1.0, 0.8),
            )
            if self.maybe():
                rule |= {"mscale": self.choice((1.0, 0.707)), "mscale_all_dim": 1.0}
        elif kind == "llama3":
            rule |= {"factor": factor, "original_max_position_embeddings": original}
            rule |= {"low_freq_factor": self.choice((1.0, 2.0)), "high_freq_factor": 4.0}
        elif kind == "longrope":
            rule |= {"original_max_position_embeddings": min(longest, 64)}
            rule["short_factor"] = [round(self.uniform(1, 2), 2) for _ in range(dim // 2)]
            rule["long_factor"] = [round(self.uniform(2, 9), 2) for _ in range(dim // 2)]
            rule |= self.some(attention_factor=(1.1,), factor=(longest / min(longest, 64),))
        return rule

    def windows(self, count: int, words: tuple[str, ...] = ()) -> Fields:
        """A window, and which blocks have it; sometimes as the family has it by itself."""
        window = {"sliding_window": self.choice((2, 4, 7, 12, 300))}
        if self.maybe():
            return window
        words = words or ("sliding_attention", "full_attention")
        return {**window, "layer_types": [self.choice(words) for _ in range(count)]}

    def kinds(self, count: int, *words: str) -> list[str]:
        """A word for each layer, the last of them once at least: without attention transformers
        has no cache."""
        kinds = [self.choice(words) for _ in range(count)]
        kinds[self.randrange(count)] = words[-1]
        return kinds

    def experts(self, count: str, top_k: str = "num_experts_per_tok") -> Fields:
        """How many, and how many of them a token visits."""
        number = self.choice((2, 4, 8, 12))
        return {count: number, top_k: self.randint(1, min(number, 4))}

    def groups(self, number: int, top_k: int, group: str = "n_group") -> Fields:
        """Groups of at least two experts of which a token may visit some."""
        possible = [n for n in (1, 2, 4) if number % n == 0 and number // n >= 2]
        count = self.choice(possible)
        least = -(-top_k // (number // count))
        return {group: count, "topk_group": self.randint(least, count)}


def _dense(draw: Draw, explicit: float = 0.5, **possible: tuple[Any, ...]) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=explicit), **draw.some(**possible)}
    return {**fields, "rope_parameters": draw.rope(fields)}


def _llama(draw: Draw) -> Fields:
    return _dense(draw, attention_bias=_BOTH, mlp_bias=_BOTH)


def _qwen2(draw: Draw, explicit: float = 0.5) -> Fields:
    fields = _dense(draw, explicit)
    if draw.maybe(0.3):
        return fields
    if draw.maybe(0.3):
        return fields | {"use_sliding_window": False, "sliding_window": 7}
    fields |= draw.windows(fields["num_hidden_layers"])
    first = draw.choice((0, 1, 2, 28))
    return fields | {"use_sliding_window": True, "max_window_layers": first}


def _qwen3(draw: Draw) -> Fields:
    return _qwen2(draw, 1.0) | draw.some(attention_bias=_BOTH)


def _sparse_layers(draw: Draw, count: int) -> Fields:
    listed = [number for number in range(count) if draw.maybe(0.3)]
    return draw.some(decoder_sparse_step=(1, 2), mlp_only_layers=(listed, [])) | draw.some(
        norm_topk_prob=_BOTH
    )


def _qwen3_moe(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0, attention_bias=_BOTH) | draw.experts("num_experts")
    if draw.maybe(0.3):
        fields |= {"sliding_window": 7, "use_sliding_window": draw.maybe()}
    fields["moe_intermediate_size"] = draw.choice((16, 24))
    return fields | _sparse_layers(draw, fields["num_hidden_layers"])


def _qwen2_moe(draw: Draw) -> Fields:
    fields = _dense(draw) | draw.experts("num_experts") | draw.some(qkv_bias=(True, True))
    fields |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    if draw.maybe():
        fields |= {"sliding_window": 7, "use_sliding_window": draw.maybe(0.7)}
        fields |= {"max_window_layers": draw.choice((0, 2, 28))}
    return fields | _sparse_layers(draw, fields["num_hidden_layers"])


def _ernie(draw: Draw) -> Fields:
    return _dense(draw, 1.0, use_bias=_BOTH)


def _ernie_moe(draw: Draw) -> Fields:
    fields = _ernie(draw) | draw.experts("moe_num_experts", "moe_k")
    fields |= {"moe_intermediate_size": 24, "moe_num_shared_experts": draw.choice((0, 1, 2))}
    count = fields["num_hidden_layers"]
    return fields | draw.some(
        moe_layer_start_index=(0, 1, 2),
        moe_layer_end_index=(-1, count - 1, 1),
        moe_layer_interval=(1, 2),
    )


def _mistral(draw: Draw, explicit: float = 0.5) -> Fields:
    fields = _dense(draw, explicit)
    return fields | {"sliding_window": draw.choice((None, 2, 5, 12, 4096))}


def _mixtral(draw: Draw) -> Fields:
    return _mistral(draw, 1.0) | draw.experts("num_local_experts")


def _gemma2(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0) | draw.windows(draw.randint(2, 5))
    if kinds := fields.get("layer_types"):
        fields["num_hidden_layers"] = len(kinds)
    return fields | draw.some(
        query_pre_attn_scalar=(16, 24),
        attn_logit_softcapping=(None, 3.0, 50.0),
        final_logit_softcapping=(None, 5.0, 30.0),
    )


def _two_ropes(draw: Draw, fields: Fields) -> Fields:
    full = draw.rope(fields)
    full.pop("truncate", None)  # transformers looks for it beside the two rules
    local = draw.rope(fields, "default")
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _gemma3(draw: Draw) -> Fields:
    fields = _gemma2(draw)
    fields.pop("attn_logit_softcapping", None)  # transformers has the field and does not use it
    if "layer_types" not in fields:
        fields["num_hidden_layers"] = draw.choice((2, 7))
        fields |= draw.some(_sliding_window_pattern=(2, 3, 6))
    return fields | _two_ropes(draw, fields)


def _gemma4(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=1.0)}
    count = fields["num_hidden_layers"]
    kinds = [*draw.kinds(count - 1, "full_attention", "sliding_attention"), "full_attention"]
    shared = [n for n in range(1, count) if set(kinds[: count - n]) == set(kinds)]
    number = draw.choice(shared) if shared and draw.maybe(0.7) else 0
    heads = fields["num_attention_heads"]
    rules: Fields = {
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((1e4, 5e4))},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
        },
    }
    return {
        **fields,
        "layer_types": kinds,
        "sliding_window": draw.choice((4, 7, 12, 300)),
        "num_kv_shared_layers": number,
        "vocab_size_per_layer_input": fields["vocab_size"],
        # transformers wants an input for blocks that share keys.
        "hidden_size_per_layer_input": 8 if number else draw.choice((0, 8)),
        "global_head_dim": draw.choice((16, 24, 32)),
        "num_global_key_value_heads": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        **draw.some(
            attention_k_eq_v=_BOTH,
            attention_bias=_BOTH,
            use_double_wide_mlp=_BOTH,
            final_logit_softcapping=(None, 5.0, 30.0),
            rope_parameters=(rules,),
        ),
    }


def _olmo2(draw: Draw) -> Fields:
    return _dense(draw, 0.0, attention_bias=_BOTH)


def _olmo3(draw: Draw) -> Fields:
    fields = _olmo2(draw)
    fields |= draw.windows(fields["num_hidden_layers"])
    return fields | _two_ropes(draw, fields)


def _phi3(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0) | {"sliding_window": draw.choice((None, 5, 2047))}
    fields["rope_parameters"] = rule = draw.rope(fields, "default", "longrope", share=draw.maybe())
    original = rule.get("original_max_position_embeddings")
    return fields | {"original_max_position_embeddings": original or 64}


def _sigmoid_experts(draw: Draw) -> Fields:
    fields = draw.experts("n_routed_experts") | {"moe_intermediate_size": draw.choice((16, 24))}
    fields |= draw.groups(fields["n_routed_experts"], fields["num_experts_per_tok"])
    fields |= draw.some(norm_topk_prob=_BOTH, routed_scaling_factor=(1.0, 2.5))
    return fields | {"n_shared_experts": draw.choice((1, 1, 2))}


def _glm4_moe(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=0.8), **_sigmoid_experts(draw)}
    fields |= draw.some(attention_bias=_BOTH, use_qk_norm=_BOTH)
    fields |= {"first_k_dense_replace": draw.randint(0, 2), "num_nextn_predict_layers": 0}
    return fields | {"rope_parameters": draw.rope(fields, share=True)}


def _sparse_kinds(draw: Draw, fields: Fields) -> Fields:
    """Dense blocks in front, in either way to say so, or anywhere."""
    count, first = fields["num_hidden_layers"], draw.randint(0, 2)
    kinds = ["dense"] * min(first, count) + ["sparse"] * max(0, count - first)
    return draw.some(mlp_layer_types=(kinds, draw.kinds(count, "dense", "sparse")))


def _dots1(draw: Draw) -> Fields:
    fields = {**_dense(draw, 1.0, attention_bias=_BOTH), **_sigmoid_experts(draw)}
    fields |= {"first_k_dense_replace": draw.randint(0, 2)}
    if draw.maybe():
        fields |= draw.windows(fields["num_hidden_layers"]) | {"max_window_layers": 1}
    return fields


def _solar_open(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=1.0), **_sigmoid_experts(draw)}
    fields |= draw.some(attention_bias=_BOTH)
    return fields | {"rope_parameters": draw.rope(fields)}


def _exaone_moe(draw: Draw) -> Fields:
    fields = _exaone4(draw) | _sigmoid_experts(draw)
    fields["num_experts"] = fields.pop("n_routed_experts")
    fields["num_shared_experts"] = fields.pop("n_shared_experts")
    return fields | draw.some(first_k_dense_replace=(0, 2)) | _sparse_kinds(draw, fields)


def _hy_v3(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0, attention_bias=_BOTH) | draw.experts("num_experts")
    fields |= {"moe_intermediate_size": 24, "num_shared_experts": draw.choice((1, 2))}
    return fields | draw.some(router_scaling_factor=(1.0, 2.5)) | _sparse_kinds(draw, fields)


def _seed_oss(draw: Draw) -> Fields:
    return _dense(draw, 1.0, attention_bias=_BOTH, attention_out_bias=_BOTH, mlp_bias=_BOTH)


def _olmoe(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0, attention_bias=_BOTH, norm_topk_prob=_BOTH)
    return fields | draw.experts("num_experts")


def _hunyuan(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0, attention_bias=_BOTH)
    if draw.maybe():
        rule = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
        fields["rope_parameters"] = rule
    return fields


def _hunyuan_moe(draw: Draw) -> Fields:
    return _hunyuan(draw) | draw.experts("num_experts", "moe_topk")


def _latent(draw: Draw) -> Fields:
    heads = draw.choice((1, 2, 4, 5))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice((12, 20)),
        "qk_rope_head_dim": draw.choice((8, 12)),
        "qk_nope_head_dim": draw.choice((8, 12)),
        "v_head_dim": draw.choice((8, 16)),
    }


def _deepseek(draw: Draw) -> Fields:
    fields = {**draw.common(), **_latent(draw), **_sigmoid_experts(draw)}
    fields |= draw.some(attention_bias=_BOTH, rope_interleave=_BOTH)
    fields |= {"first_k_dense_replace": draw.randint(0, 2), "num_nextn_predict_layers": 0}
    fields["q_lora_rank"] = draw.choice((None, 16, 28))
    return fields | {"rope_parameters": draw.rope(fields)}


def _deepseek_v32(draw: Draw) -> Fields:
    fields = _deepseek(draw) | {"index_n_heads": 16, "index_topk": draw.choice((4, 12, 64))}
    fields |= {"q_lora_rank": draw.choice((16, 28)), "index_head_dim": draw.choice((12, 16))}
    fields.pop("rope_interleave", None)
    first = fields.pop("first_k_dense_replace")
    count = fields["num_hidden_layers"]
    kinds = ["dense"] * min(first, count) + ["sparse"] * max(0, count - first)
    return fields | {"mlp_layer_types": kinds} | draw.some(mlp_bias=_BOTH)


def _glm_lite(draw: Draw) -> Fields:
    fields = _deepseek(draw)
    first, count = fields.pop("first_k_dense_replace"), fields["num_hidden_layers"]
    kinds = ["dense"] * min(first, count) + ["sparse"] * max(0, count - first)
    return fields | draw.some(mlp_layer_types=(kinds,))


def _smollm3(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0, attention_bias=_BOTH, mlp_bias=_BOTH, use_sliding_window=_BOTH)
    turning = [draw.choice((0, 1)) for _ in range(fields["num_hidden_layers"])]
    return fields | draw.some(
        sliding_window=(4, 9), no_rope_layers=(turning, None), no_rope_layer_interval=(2, 3)
    )


def _gpt_oss(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0) | draw.experts("num_local_experts") | draw.some(attention_bias=_BOTH)
    fields |= draw.windows(fields["num_hidden_layers"])
    return fields | draw.some(swiglu_limit=(1.5, 7.0), swiglu_alpha=(1.0, 1.702))


def _minimax_m2(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=1.0), **draw.experts("num_local_experts")}
    return fields | {"rope_parameters": draw.rope(fields, share=True)}


def _llama4(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0, attention_bias=_BOTH, use_qk_norm=_BOTH)
    count = fields["num_hidden_layers"]
    fields["rope_parameters"] = draw.rope(fields, "default", "llama3")
    fields |= {"num_local_experts": draw.choice((1, 2, 4)), "intermediate_size_mlp": 40}
    turning = [draw.choice((0, 1)) for _ in range(count)]
    return fields | draw.some(
        no_rope_layers=(turning, None),
        no_rope_layer_interval=(2, 4),
        moe_layers=([n for n in range(count) if draw.maybe()],),
        interleave_moe_layer_step=(1, 2),
        attention_chunk_size=(4, 8, 100),
        attn_temperature_tuning=_BOTH,
        floor_scale=(4, 16),
        attn_scale=(0.1, 0.5),
    )


def _delta(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=1.0)}
    keys, count = draw.choice((1, 2, 3)), fields["num_hidden_layers"]
    fields |= {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((8, 12)),
        "linear_value_head_dim": draw.choice((8, 16)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
    }
    if count < 4 or draw.maybe():
        fields["layer_types"] = draw.kinds(count, "linear_attention", "full_attention")
    return fields | {"rope_parameters": draw.rope(fields, share=True)}


def _shared_experts(draw: Draw) -> Fields:
    fields = draw.experts("num_experts") | {"moe_intermediate_size": 24}
    return fields | {"shared_expert_intermediate_size": draw.choice((16, 40))}


def _qwen3_next(draw: Draw) -> Fields:
    fields = _delta(draw) | _shared_experts(draw)
    return fields | _sparse_layers(draw, fields["num_hidden_layers"])


def _qwen3_5(draw: Draw) -> Fields:
    fields = _delta(draw)
    rule = fields["rope_parameters"]
    half = int(fields["head_dim"] * rule["partial_rotary_factor"]) // 2
    if draw.maybe() and half >= 3:
        rule |= {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
        rule |= {"mrope_interleaved": True}
    return fields


def _qwen3_5_moe(draw: Draw) -> Fields:
    return _qwen3_5(draw) | _shared_experts(draw)


def _mamba(draw: Draw) -> tuple[int, int, int]:
    groups = draw.choice((1, 2))
    return groups, groups * draw.choice((1, 2, 4)), draw.choice((8, 12))


_MULTIPLIERS: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (3.0, 12),
    "attention_multiplier": (0.2, 0.0078125),
    "residual_multiplier": (0.5, 0.22),
    "logits_scaling": (2.0, 16),
}


def _granite3(draw: Draw) -> Fields:
    return _dense(draw, 0.0, attention_bias=_BOTH, mlp_bias=_BOTH, **_MULTIPLIERS)


def _granite3_moe(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0, attention_bias=_BOTH, **_MULTIPLIERS)
    return fields | draw.experts("num_local_experts")


def _glm4(draw: Draw) -> Fields:
    fields = {**draw.common(), **draw.heads(explicit=1.0), **draw.some(attention_bias=_BOTH)}
    return fields | {"rope_parameters": draw.rope(fields, share=True)}


def _exaone4(draw: Draw) -> Fields:
    fields = _dense(draw, 1.0) | draw.windows(draw.randint(2, 5))
    if kinds := fields.get("layer_types"):
        return fields | {"num_hidden_layers": len(kinds)}
    return fields | draw.some(sliding_window_pattern=(2, 3))


def _cohere(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0, attention_bias=_BOTH, logit_scale=(0.25, 0.0625))
    fields.pop("rms_norm_eps", None)
    return fields | draw.some(layer_norm_eps=(1e-6, 1e-3))


def _cohere2(draw: Draw) -> Fields:
    fields = _cohere(draw)
    return fields | draw.windows(fields["num_hidden_layers"])


def _cohere2_moe(draw: Draw) -> Fields:
    fields = _cohere2(draw) | draw.experts("num_experts") | {"head_dim": draw.choice((8, 16))}
    # transformers has rope_scaling here and does not use it.
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    if "layer_types" not in fields or draw.maybe():
        fields["first_k_dense_replace"] = draw.randint(0, 2)
    return fields | draw.some(
        expert_selection_fn=("softmax", "sigmoid"),
        norm_topk_prob=_BOTH,
        num_shared_experts=(1, 2),
        prefix_dense_intermediate_size=(24, 56),
        rms_norm_eps=(1e-5,),
        prefix_dense_sliding_window_pattern=(1, 2),
        shared_expert_combination_strategy=("average", "sum"),
        sliding_window_pattern=(2, 3),
    )


def _granite(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0, attention_bias=_BOTH)
    groups, heads, _ = _mamba(draw)
    # transformers wants heads times their width to be mamba_expand times hidden_size.
    fields["mamba_expand"] = expand = draw.choice((1, 2))
    fields["hidden_size"] = hidden = fields["num_attention_heads"] * heads * 4
    count = fields["num_hidden_layers"]
    fields["rope_parameters"] = draw.rope(fields)
    return {
        **fields,
        "layer_types": draw.kinds(count, "mamba", "attention"),
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_head": draw.choice(("auto", expand * hidden // heads)),
        "mamba_d_state": draw.choice((8, 16)),
        "mamba_d_conv": draw.choice((2, 4)),
        "mamba_chunk_size": draw.choice((4, 16)),
        "shared_intermediate_size": draw.choice((24, 40)),
        **draw.experts("num_local_experts"),
        **({"num_local_experts": 0} if draw.maybe() else {}),
        **draw.some(
            mamba_conv_bias=_BOTH,
            mamba_proj_bias=_BOTH,
            position_embedding_type=("rope", "nope", None),
            **_MULTIPLIERS,
        ),
    }


def _nemotron(draw: Draw) -> Fields:
    groups, heads, dim = _mamba(draw)
    fields = {**draw.common(), **draw.heads(explicit=1.0), **_sigmoid_experts(draw)}
    fields |= {"n_shared_experts": 1, "tie_word_embeddings": False}
    count = fields.pop("num_hidden_layers") + 2
    kinds = draw.kinds(count, "linear_attention", "mlp", "moe", "full_attention")
    return {
        **fields,
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": groups,
        "ssm_state_size": draw.choice((8, 16)),
        "conv_kernel": draw.choice((2, 4)),
        "chunk_size": draw.choice((4, 16)),
        "time_step_min": 1e-30,  # below it transformers cuts steps of prompts, none of decodes
        "moe_shared_expert_intermediate_size": 40,
        "layer_norm_epsilon": fields.pop("rms_norm_eps", 1e-5),
        **draw.some(
            mlp_bias=_BOTH,
            use_bias=_BOTH,
            use_conv_bias=_BOTH,
            moe_latent_size=(None, 32),
        ),
    }


def _kimi_linear(draw: Draw) -> Fields:
    fields = {**draw.common(), **_latent(draw), **draw.experts("num_experts")}
    fields["tie_word_embeddings"] = False  # transformers has the field and never ties
    fields["num_experts_per_token"] = fields.pop("num_experts_per_tok")
    fields["model_max_length"] = fields.pop("max_position_embeddings")
    groups = draw.groups(fields["num_experts"], fields["num_experts_per_token"])
    count, first = fields["num_hidden_layers"], draw.randint(0, 2)
    kinds = draw.kinds(count, "linear_attention", "full_attention")
    return {
        **fields,
        "num_expert_group": groups["n_group"],
        "topk_group": groups["topk_group"],
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * min(first, count) + ["sparse"] * max(0, count - first),
        "linear_head_dim": draw.choice((8, 16)),
        "linear_num_heads": draw.choice((1, 2, 3)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "moe_intermediate_size": 24,
        "num_shared_experts": draw.choice((1, 2)),
        **draw.some(
            moe_renormalize=_BOTH, routed_scaling_factor=(1.0, 2.5), q_lora_rank=(None, None, 16)
        ),
    }


def _lfm2(draw: Draw) -> Fields:
    fields = _dense(draw, 0.0)
    fields["norm_eps"] = fields.pop("rms_norm_eps", 1e-5)
    count = fields["num_hidden_layers"]
    fields["layer_types"] = draw.kinds(count, "conv", "full_attention")
    return fields | draw.some(
        conv_L_cache=(2, 3, 4),
        conv_bias=_BOTH,
        block_auto_adjust_ff_dim=_BOTH,
        block_multiple_of=(8, 16),
        block_ffn_dim_multiplier=(1.0, 1.5),
    )


def _lfm2_moe(draw: Draw) -> Fields:
    fields = {k: v for k, v in _lfm2(draw).items() if not k.startswith("block_")}
    fields |= draw.experts("num_experts") | {"moe_intermediate_size": 24}
    return fields | draw.some(
        norm_topk_prob=_BOTH,
        num_dense_layers=(0, 1),
        routed_scaling_factor=(1.0, 2.5),
        use_expert_bias=_BOTH,
    )


# How a text architecture's fields are drawn, by its name without ForCausalLM.
FAMILIES: dict[str, Callable[[Draw], Fields]] = {
    "Cohere": _cohere,
    "Cohere2": _cohere2,
    "Cohere2Moe": _cohere2_moe,
    "DeepseekV3": _deepseek,
    "DeepseekV32": _deepseek_v32,
    "Dots1": _dots1,
    "Ernie4_5": _ernie,
    "Ernie4_5_Moe": _ernie_moe,
    "Exaone4": _exaone4,
    "ExaoneMoe": _exaone_moe,
    "Gemma2": _gemma2,
    "Gemma3": _gemma3,
    "Gemma4": _gemma4,
    "Glm": _glm4,
    "Glm4": _glm4,
    "Glm4Moe": _glm4_moe,
    "Glm4MoeLite": _glm_lite,
    "GlmMoeDsa": _deepseek_v32,
    "GptOss": _gpt_oss,
    "Granite": _granite3,
    "GraniteMoe": _granite3_moe,
    "GraniteMoeHybrid": _granite,
    "HYV3": _hy_v3,
    "HunYuanDenseV1": _hunyuan,
    "HunYuanMoEV1": _hunyuan_moe,
    "KimiLinear": _kimi_linear,
    "Lfm2": _lfm2,
    "Lfm2Moe": _lfm2_moe,
    "Llama": _llama,
    "Llama4": _llama4,
    "MiniMaxM2": _minimax_m2,
    "Mistral": _mistral,
    "Mixtral": _mixtral,
    "NemotronH": _nemotron,
    "Olmo2": _olmo2,
    "Olmo3": _olmo3,
    "Olmoe": _olmoe,
    "Phi3": _phi3,
    "Qwen2": _qwen2,
    "Qwen2Moe": _qwen2_moe,
    "Qwen3": _qwen3,
    "Qwen3Moe": _qwen3_moe,
    "Qwen3Next": _qwen3_next,
    "Qwen3_5": _qwen3_5,
    "Qwen3_5Moe": _qwen3_5_moe,
    "SeedOss": _seed_oss,
    "SmolLM3": _smollm3,
    "SolarOpen": _solar_open,
}
_TEXT_CONFIG = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")


@dataclass(frozen=True, slots=True)
class Case:
    """One random checkpoint, made again from its name alone."""

    family: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.family}-{self.seed}"

    def drawn(self) -> tuple[Fields, Draw]:
        """Its fields, and what draws how they are written."""
        draw = Draw(self.name)
        return FAMILIES[self.family](draw), draw


# Words of released folders for what transformers writes otherwise.
_OLDER = {
    "Gemma3": {"_sliding_window_pattern": "sliding_window_pattern"},
    "KimiLinear": {"model_max_length": "max_position_embeddings"},
    "Qwen3Moe": {"num_local_experts": "num_experts"},
}
# Sizes, and what says who wrote it, are in every config.json.
_KEPT = ("transformers_version", "model_type", "dtype", "moe_k", "n_routed_experts")
_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def respell(family: str, config: Fields, defaults: Fields, draw: Draw) -> Fields:
    """config.json as others write it, here and there: without what is so by default, and in the
    words of older releases."""
    for key in [k for k, value in config.items() if k in defaults and value == defaults[k]]:
        if key not in _KEPT and "num_" not in key and draw.maybe(0.3):
            del config[key]
    if draw.maybe():
        for new, old in _OLDER.get(family, {}).items():
            config |= {old: config.pop(new)} if new in config else {}
        if family == "NemotronH":
            kinds = config.pop("layers_block_type")
            config["hybrid_override_pattern"] = "".join(_LETTERS[kind] for kind in kinds)
        if family == "KimiLinear":
            _released_kimi(config)
        if family == "DeepseekV32":
            kinds = config.pop("mlp_layer_types", [])
            config["first_k_dense_replace"] = kinds.count("dense")
    rule = config.get("rope_parameters")
    if draw.maybe(0.4) and isinstance(rule, dict) and "rope_theta" in rule:
        config.pop("rope_parameters")
        config["rope_theta"] = rule.pop("rope_theta")
        usual = defaults["rope_parameters"].get("rope_theta")
        if usual == config["rope_theta"] and draw.maybe():
            del config["rope_theta"]
        if (share := rule.pop("partial_rotary_factor", None)) is not None:
            config["partial_rotary_factor"] = share
        kind = rule.pop("rope_type", "default")
        word = draw.choice(("type", "rope_type"))
        is_plain = kind == "default" and not rule and family != "GptOss"  # null is YaRN there
        config["rope_scaling"] = None if is_plain else {word: kind, **rule}
    if draw.maybe(0.3) and "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    return config


def _released_kimi(config: Fields) -> None:
    kinds = config.pop("layer_types")
    numbers = range(1, len(kinds) + 1)
    config["linear_attn_config"] = {
        "full_attn_layers": [n for n in numbers if kinds[n - 1] == "full_attention"],
        "kda_layers": [n for n in numbers if kinds[n - 1] == "linear_attention"],
        "head_dim": config.pop("linear_head_dim", 128),
        "num_heads": config.pop("linear_num_heads", 32),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim", 4),
    }
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")


def make(case: Case, folder: Path) -> None:
    """The checkpoint, and beside it what transformers says about it, in this process."""
    import torch
    import transformers

    from tests.checkpoints import _randomize, obey_config

    fields, draw = case.drawn()
    word = "TextConfig" if case.family in _TEXT_CONFIG else "Config"
    config = getattr(transformers, f"{case.family}{word}")(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(case.seed)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
    _randomize(model)
    if draw.maybe(0.2):
        model = model.bfloat16()
    model.save_pretrained(folder, max_shard_size=draw.choice(("60KB", "5GB")))
    written = json.loads((folder / "config.json").read_text())
    defaults = type(config)().to_dict()
    written = respell(case.family, written, defaults, draw)
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    read = type(model).from_pretrained(folder, dtype="float32", attn_implementation="eager")
    model = obey_config(read.float().eval())
    answers: dict[str, np.ndarray] = {}
    for number, length in enumerate(LENGTHS):
        prompt = [draw.randrange(3, fields["vocab_size"]) for _ in range(length)]
        tokens, steps = [], []
        answers[f"prompt{number}"] = np.array(prompt)
        with torch.no_grad():
            output = model(torch.tensor(prompt)[None], use_cache=True)
            answers[f"logits{number}"] = output.logits[0].numpy()
            for _ in range(NUM_GREEDY):
                last = output.logits[0, -1]
                tokens.append(int(last.argmax()))
                steps.append(last.numpy())
                step = torch.tensor([tokens[-1:]])
                output = model(step, past_key_values=output.past_key_values, use_cache=True)
        answers[f"tokens{number}"], answers[f"steps{number}"] = np.array(tokens), np.array(steps)
    np.savez(folder / "reference.npz", **answers)


def build(cases: list[Case], folder: Path) -> None:
    """All of them, in a child process with torch. A folder without reference.npz has error.txt."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    names = [case.name for case in cases]
    command = [sys.executable, "-m", "tests.config_fuzz", "--make", str(folder), *names]
    subprocess.run(
        command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def compare(case: Case, folder: Path, library: str) -> None:
    """AssertionError if one logit or token differs: of prompts in one batch, decoded together, and
    in pieces beside a decode."""
    from tests.paged import PagedModel

    with np.load(folder / "reference.npz") as data:
        answers = dict(data)
    config = json.loads((folder / "config.json").read_text())
    model = PagedModel(folder, library, dtype="float32", **_limits(config))
    try:
        _compare(model, answers, random.Random(case.seed))
    finally:
        model.close()


def _limits(config: Fields) -> Fields:
    """longrope is exact up to the trained length."""
    rule = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rule = rule.get("full_attention") or rule
    is_long = rule.get("rope_type", rule.get("type")) == "longrope"
    key = "original_max_position_embeddings"
    return {"max_model_len": rule.get(key) or config[key]} if is_long else {}


def _compare(model: Any, answers: dict[str, np.ndarray], draw: random.Random) -> None:
    names = [str(number) for number in range(len(LENGTHS))]
    prompts = {n: answers[f"prompt{n}"].tolist() for n in names}
    for n, logits in zip(names, model.step(list(prompts.items())), strict=True):
        _check("prompt", logits, answers[f"logits{n}"])
    for step in range(1, NUM_GREEDY):
        rows = [(n, [int(answers[f"tokens{n}"][step - 1])]) for n in names]
        for n, logits in zip(names, model.step(rows), strict=True):
            _check(f"token {step}", logits, answers[f"steps{n}"][step][None])
    tokens, prompt, pieces = answers["tokens0"], prompts["1"], list[np.ndarray]()
    model.step([("beside", prompts["0"])])
    cuts = [0, *sorted(draw.sample(range(1, len(prompt)), 3)), len(prompt)]
    for number, (first, end) in enumerate(pairwise(cuts)):
        rows = [("piece", prompt[first:end]), ("beside", [int(tokens[number])])]
        piece, beside = model.step(rows)
        pieces.append(piece)
        _check("beside pieces", beside, answers["steps0"][number + 1][None])
    _check("pieces", np.concatenate(pieces), answers["logits1"])


def _check(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Close, and the same likeliest tokens but where two are as likely."""
    assert ours.shape == theirs.shape, f"{what}: {ours.shape} logits, not {theirs.shape}"
    largest = np.abs(theirs).max()
    error = float(np.abs(ours - theirs).max() / largest)
    assert error < TOLERANCE, f"{what}: logits differ by {error:.1e} of the largest"
    second, first = np.sort(theirs, -1)[:, -2:].T
    sure = first - second > 2 * TOLERANCE * largest
    assert (ours.argmax(-1) == theirs.argmax(-1))[sure].all(), f"{what}: other tokens"


@dataclass(slots=True)
class Report:
    """What came of the cases."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run(cases: list[Case], folder: Path, library: str) -> Report:
    """Make and compare all of them."""
    from fastdeploy_core.errors import ConfigError, UnsupportedModel

    build(cases, folder)
    report = Report()
    for case in cases:
        place, outcome = folder / case.name, "equal"
        if not (place / "reference.npz").exists():
            outcome = "transformers fails"
            report.refused[case.name] = (place / "error.txt").read_text()
        else:
            try:
                compare(case, place, library)
            except (ConfigError, UnsupportedModel) as refusal:
                outcome, report.refused[case.name] = "refused", str(refusal)
            except Exception as error:
                outcome = "differs" if isinstance(error, AssertionError) else "crashed"
                report.failed[case.name] = "".join(traceback.format_exception(error))
        report.counts[f"{case.family} {outcome}"] += 1
    return report


def _make_all(folder: Path, names: Iterator[str]) -> None:
    for name in names:
        family, _, seed = name.rpartition("-")
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        try:
            make(Case(family, int(seed)), place)
        except Exception:
            (place / "error.txt").write_text(traceback.format_exc())


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default="torch")
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--make", nargs="+")
    asked = parser.parse_args()
    if asked.make:
        _make_all(Path(asked.make[0]), iter(asked.make[1:]))
        return 0
    first, _, end = asked.seeds.partition(":")
    cases = [Case(f, n) for f in asked.only for n in range(int(first), int(end))]
    with tempfile.TemporaryDirectory() as scratch:
        report = run(cases, asked.keep or Path(scratch), asked.library)
    for name, text in (report.refused | report.failed).items():
        print(f"--- {name}\n{text}")
    for outcome, count in sorted(report.counts.items()):
        print(f"{outcome}: {count}")
    return bool(report.failed)


if __name__ == "__main__":
    sys.exit(main())
