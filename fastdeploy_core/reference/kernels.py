"""The reference's kernel table: every operation of contracts/ops/, by name, as strings only."""

from __future__ import annotations

from typing import Final

from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.ops import Kernel
from fastdeploy_core.contracts.quant_formats import FORMATS

_OPS = "fastdeploy_core.reference.ops"
# Modules of ops/, with the operations that each holds.
_PLAIN = {
    "body": "embedding linear rms_norm add_rms_norm silu_and_mul select_rows rotary_embedding",
    "cache": "kv_write kv_copy_blocks kv_read_blocks kv_write_blocks",
    "step": "prepare_decode finish_decode keep_results place_tokens keep_drafts mark_broken",
    "history": "append_history match_ngrams",
    "moe": "moe_routing moe_experts",
    "sampling": "apply_penalties apply_bitmask filter_logits sample greedy log_softmax",
}
_COMPOSING = {
    "fused": "norm_linear gated_linear linear_add qk_norm concat_rms_norm linear_float32 "
    "linear_logits greedy_linear",
    "sampling": "draw",
}

TABLE: Final[dict[str, str | Kernel]] = {
    **{n: f"{_OPS}.{room}:{n}" for room, names in _PLAIN.items() for n in names.split()},
    **{
        name: Kernel(f"{_OPS}.{room}:{name}", composes=True)
        for room, names in _COMPOSING.items()
        for name in names.split()
    },
    # One definition serves all formats, because a format defines its own dequantization.
    **{f.linear: f"{_OPS}.quantized:linear_packed" for f in FORMATS.values()},
    **{f.experts: f"{_OPS}.quantized:moe_experts_packed" for f in FORMATS.values()},
    **{f.write: f"{_OPS}.kv:{f.write}" for f in KV_FORMATS.values()},
}
