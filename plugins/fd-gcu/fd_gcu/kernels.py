"""Cells of the kernel table: filled where the vendor's operators are installed."""

from __future__ import annotations

from fastdeploy_core.contracts.ops import Kernel

_OPERATORS = "fd_gcu.operators"

TABLE = {
    "rms_norm": Kernel(f"{_OPERATORS}:rms_norm", f"{_OPERATORS}:has_norms"),
    "add_rms_norm": Kernel(f"{_OPERATORS}:add_rms_norm", f"{_OPERATORS}:has_norms"),
    "linear_wint8": Kernel(f"{_OPERATORS}:linear_wint8", f"{_OPERATORS}:has_linear_quant"),
    "moe_experts": Kernel(f"{_OPERATORS}:moe_experts", f"{_OPERATORS}:has_moe"),
}
