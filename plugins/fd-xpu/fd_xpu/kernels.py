"""Cells of the kernel table. None: experts are a driver's (moe.py), and the layout of the vendor's
weight-only product is known to its own quantizing operator alone."""

from __future__ import annotations

TABLE: dict[str, str] = {}
