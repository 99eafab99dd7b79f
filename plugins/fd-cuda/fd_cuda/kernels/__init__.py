"""Operations that this device implements itself: name in contracts/ops.py -> "module:function".

One module per kind of work: linear.py (products and what is fused with them; plans.py chooses kernels),
norm.py, cache.py, step.py (around a decode step), sampling.py and filtering.py (logits to tokens),
routing.py and experts.py (mixture of experts). native/ holds CUDA C++, everything else is Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_core.contracts.ops import Kernel

_MODULES: Final = {
    "linear": ("linear", "norm_linear", "gated_linear", "linear_add", "greedy_linear"),
    "matmul": ("linear_float32",),
    "norm": ("rms_norm", "add_rms_norm", "qk_norm", "silu_and_mul"),
    "cache": (
        "embedding",
        "rotary_embedding",
        "kv_write",
        "kv_copy_blocks",
        "kv_read_blocks",
        "kv_write_blocks",
    ),
    "step": ("prepare_decode", "finish_decode", "judge_drafts", "keep_drafts", "mark_broken"),
    "history": ("append_history", "match_ngrams"),
    "routing": ("moe_routing",),
    "experts": ("moe_experts",),
    "sampling": ("greedy", "sample", "apply_penalties", "apply_bitmask", "log_softmax"),
    "filtering": ("filter_logits",),
}


def runs_here(facts: Mapping[str, Any]) -> bool:
    """Whether these kernels can be used: they are written for torch tensors and need Triton."""
    return (
        facts.get("tensor_library", "torch") == "torch"
        and importlib.util.find_spec("triton") is not None
    )


TABLE: Final = {
    operation: Kernel(f"fd_cuda.kernels.{module}:{operation}", "fd_cuda.kernels:runs_here")
    for module, operations in _MODULES.items()
    for operation in operations
}
