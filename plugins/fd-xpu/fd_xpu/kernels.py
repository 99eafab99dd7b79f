"""Cells of the kernel table. None yet: the vendor's MoE operator takes the router's weight instead of
its logits, and its weight-only product is a quantizer's business."""

from __future__ import annotations

TABLE: dict[str, str] = {}
