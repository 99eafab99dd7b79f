"""The reference's kernel table: every operation of contracts/ops/, by name, as strings only."""

from __future__ import annotations

from typing import Final

from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.ops import Kernel
from fastdeploy_core.contracts.quant_formats import FORMATS

_BODY = "fastdeploy_core.reference.ops.body"
_FUSED = "fastdeploy_core.reference.ops.fused"
_CACHE = "fastdeploy_core.reference.ops.cache"
_MOE = "fastdeploy_core.reference.ops.moe"
_QUANTIZED = "fastdeploy_core.reference.ops.quantized"
_SAMPLING = "fastdeploy_core.reference.ops.sampling"
_STEP = "fastdeploy_core.reference.ops.step"
_HISTORY = "fastdeploy_core.reference.ops.history"

TABLE: Final[dict[str, str | Kernel]] = {
    "embedding": f"{_BODY}:embedding",
    "linear": f"{_BODY}:linear",
    "rms_norm": f"{_BODY}:rms_norm",
    "add_rms_norm": f"{_BODY}:add_rms_norm",
    "silu_and_mul": f"{_BODY}:silu_and_mul",
    "select_rows": f"{_BODY}:select_rows",
    "rotary_embedding": f"{_BODY}:rotary_embedding",
    **{
        name: Kernel(f"{_FUSED}:{name}", composes=True)
        for name in (
            "norm_linear",
            "gated_linear",
            "linear_add",
            "qk_norm",
            "concat_rms_norm",
            "linear_float32",
            "linear_logits",
            "greedy_linear",
        )
    },
    "kv_write": f"{_CACHE}:kv_write",
    "kv_copy_blocks": f"{_CACHE}:kv_copy_blocks",
    "kv_read_blocks": f"{_CACHE}:kv_read_blocks",
    "kv_write_blocks": f"{_CACHE}:kv_write_blocks",
    "prepare_decode": f"{_STEP}:prepare_decode",
    "finish_decode": f"{_STEP}:finish_decode",
    "keep_results": f"{_STEP}:keep_results",
    "place_tokens": f"{_STEP}:place_tokens",
    "keep_drafts": f"{_STEP}:keep_drafts",
    "append_history": f"{_HISTORY}:append_history",
    "match_ngrams": f"{_HISTORY}:match_ngrams",
    "moe_routing": f"{_MOE}:moe_routing",
    "moe_experts": f"{_MOE}:moe_experts",
    "apply_penalties": f"{_SAMPLING}:apply_penalties",
    "apply_bitmask": f"{_SAMPLING}:apply_bitmask",
    "filter_logits": f"{_SAMPLING}:filter_logits",
    "sample": f"{_SAMPLING}:sample",
    "greedy": f"{_SAMPLING}:greedy",
    "draw": Kernel(f"{_SAMPLING}:draw", composes=True),
    "mark_broken": f"{_STEP}:mark_broken",
    "log_softmax": f"{_SAMPLING}:log_softmax",
    # One definition serves all formats, because a format defines its own dequantization.
    **{f.linear: f"{_QUANTIZED}:linear_packed" for f in FORMATS.values()},
    **{f.experts: f"{_QUANTIZED}:moe_experts_packed" for f in FORMATS.values()},
    **{f.write: f"fastdeploy_core.reference.ops.kv:{f.write}" for f in KV_FORMATS.values()},
}
