"""Cells of the kernel table. None: the vendor's PaddlePaddle plugin compiles PaddlePaddle's own GPU
kernels, and its MoE operator takes int8 weights only."""

from __future__ import annotations

TABLE: dict[str, str] = {}
