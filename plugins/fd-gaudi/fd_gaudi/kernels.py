"""Cells of the kernel table: filled where the vendor's operators are installed."""

from __future__ import annotations

from fastdeploy_core.contracts.ops import Kernel

_OPERATORS = "fd_gaudi.operators"

TABLE = {
    "kv_write": Kernel(f"{_OPERATORS}:kv_write", f"{_OPERATORS}:has_index_copy"),
    "kv_write_blocks": Kernel(f"{_OPERATORS}:kv_write_blocks", f"{_OPERATORS}:has_index_copy"),
}
