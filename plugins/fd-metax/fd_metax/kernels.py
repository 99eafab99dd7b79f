"""Cells of the kernel table. None: the vendor's PaddlePaddle plugin compiles PaddlePaddle's own GPU
kernels, so the plain composition runs on the chip."""

from __future__ import annotations

TABLE: dict[str, str] = {}
