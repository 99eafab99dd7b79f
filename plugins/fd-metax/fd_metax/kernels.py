"""Cells of the kernel table: int8 experts, where the vendor's operators are installed. Nothing
else: the vendor's PaddlePaddle plugin compiles PaddlePaddle's own GPU kernels, so the plain
composition runs on the chip."""

from __future__ import annotations

from fastdeploy_core.contracts.ops import Kernel

_OPERATORS = "fd_metax.operators"

TABLE = {
    "moe_experts_wint8": Kernel(
        f"{_OPERATORS}:moe_experts_wint8", f"{_OPERATORS}:moe_experts_wint8.applies"
    ),
}
