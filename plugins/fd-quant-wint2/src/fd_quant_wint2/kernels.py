"""Reference cells of the formats here: the core's definition by dequantization, found by name."""

from __future__ import annotations

from typing import Final

from .formats import FORMATS

_ROOM = "fastdeploy_core.reference.ops.quantized"

TABLE: Final[dict[str, str]] = {
    **{f.linear: f"{_ROOM}:linear_packed" for f in FORMATS.values()},
    **{f.experts: f"{_ROOM}:moe_experts_packed" for f in FORMATS.values()},
}
