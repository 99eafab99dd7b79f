"""Cells of the kernel table: filled where the vendor's operators are installed, but for the
experts, whose shapes must not depend on who goes to whom."""

from __future__ import annotations

from fastdeploy_core.contracts.ops import Kernel

_OPERATORS = "fd_gaudi.operators"

TABLE = {
    "moe_experts": Kernel(f"{_OPERATORS}:moe_experts"),
    "kv_write": Kernel(f"{_OPERATORS}:kv_write", f"{_OPERATORS}:has_index_copy"),
    "kv_write_blocks": Kernel(f"{_OPERATORS}:kv_write_blocks", f"{_OPERATORS}:has_index_copy"),
}
