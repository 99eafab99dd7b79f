"""Operations that this device implements itself: name in contracts/ops/ -> "module:function".

One module per kind of work: linear.py (products and what is fused with them; plans.py chooses
kernels), norm.py, cache.py, step.py (around a decode step), sampling.py and filtering.py (logits to
tokens), routing.py and experts.py (mixture of experts), lora.py and expert_lora.py (adapters),
gates.py (around recurrences), quant_*.py (packed weights). native/ holds CUDA C++, everything else
is Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_core.contracts.ops import KV_OPERATIONS, Kernel
from fastdeploy_core.contracts.quant_formats import FORMATS

from fd_cuda.probe import capability, why_not_triton

_MODULES: Final = {
    "linear": ("linear", "norm_linear", "gated_linear", "linear_add", "greedy_linear"),
    "matmul": ("linear_float32",),
    "norm": ("rms_norm", "add_rms_norm", "concat_rms_norm", "qk_norm", "silu_and_mul"),
    "cache": ("rotary_embedding", "kv_write"),
    "quant_cache": tuple(KV_OPERATIONS),
    "step": (
        "prepare_decode",
        "place_tokens",
        "finish_decode",
        "keep_drafts",
        "mark_broken",
    ),
    "history": ("append_history", "match_ngrams"),
    "routing": ("moe_routing",),
    "experts": ("moe_experts",),
    "sampling": ("greedy", "sample", "apply_penalties", "apply_bitmask", "log_softmax"),
    "filtering": ("filter_logits",),
    "lora": ("lora", "adapted_product", "deferring_add", "deferred_product", "deferred_norm"),
    "expert_lora": ("lora_experts",),
    "gates": ("gated_norm", "add_gated", "regroup"),  # which fd-models defines
}


def runs_here(facts: Mapping[str, Any]) -> bool:
    """Whether these kernels can be used: they are written for torch tensors and need Triton."""
    return facts.get("tensor_library", "torch") == "torch" and not why_not_triton()


def reads_codes(facts: Mapping[str, Any]) -> bool:
    """Of weights of codes: whether the native kernels run, which alone can read them. Elsewhere the
    reference dequantizes them at every call, and says so."""
    is_half = facts.get("dtype", "bfloat16") in ("bfloat16", "float16")
    return runs_here(facts) and is_half and capability()[0] in (0, 9)


def _packed_cells() -> dict[str, Kernel]:
    """Products with packed weights: of the core's formats, and of fd-quant-wint2's two."""
    rooms = dict.fromkeys(FORMATS, ("linear", "experts", "weights:prepare"))
    rooms["ccq2"] = ("linear", "experts", "weights:prepare")
    rooms["tet2"] = ("trellis", "trellis", "trellis:prepare")
    behind = {
        operation: f"fd_cuda.kernels.quant_fused:{operation}"
        for operation in ("add_rms_norm", "silu_and_mul")
    }
    return {
        operation: Kernel(
            f"fd_cuda.kernels.quant_{target}",
            f"fd_cuda.kernels:{'runs_here' if kind in FORMATS else 'reads_codes'}",
            f"fd_cuda.kernels.quant_{prepare}",
            behind=behind if target == "linear:linear" else {},
        )
        for kind, (linear, experts, prepare) in rooms.items()
        for operation, target in (
            (f"linear_{kind}", f"{linear}:linear"),
            (f"moe_experts_{kind}", f"{experts}:moe_experts"),
        )
    }


TABLE: Final = {
    operation: Kernel(f"fd_cuda.kernels.{module}:{operation}", "fd_cuda.kernels:runs_here")
    for module, operations in _MODULES.items()
    for operation in operations
} | _packed_cells()
# Rows of an embedding once a step, and whole blocks rarely and in bulk: torch's gather and scatter
# run at the memory's speed.
for where, operation in (
    ("body", "embedding"),
    *(("cache", f"kv_{name}_blocks") for name in ("copy", "read", "write")),
):
    TABLE[operation] = Kernel(
        f"fastdeploy_core.reference.ops.{where}:{operation}", "fd_cuda.kernels:runs_here"
    )
# Of gpt-oss; fd-models defines both, and fd-quant-formats the format.
TABLE["moe_routing_widened"] = TABLE["moe_routing"]
TABLE["moe_experts_clamped"] = Kernel(
    "fd_cuda.kernels.quant_any:moe_experts_clamped",
    "fd_cuda.kernels:runs_here",
    "fd_cuda.kernels.quant_any:prepare",
    formats=("mxfp4",),
)
