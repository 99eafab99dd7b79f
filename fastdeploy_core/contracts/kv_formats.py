"""Formats of the KV cache: what lies in a block instead of the model's own numbers.

A cache of a quantized format has, for each of its rows (k and v, or the latent row of "mla"), the
rounded numbers [blocks, block_size, heads, ...]. Dynamic scales lie after them in the same order,
one row for each number row, so that whatever moves blocks moves their scales too:

    dynamic   (k, v, k_scale, v_scale) or (latent, latent_scale); computed per head and token
    static    (k, v); scales belong to the layer and come from the checkpoint

The meaning of a number q: q * scale, with a zero point q * scale + minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fastdeploy_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One format; `bound` is the largest magnitude of q, or the largest q with a zero point."""

    name: str
    dtype: str
    bound: float
    per_byte: int = 1  # numbers in one element; pairs lie low nibble first
    has_minimum: bool = False
    scale_dtype: str = "float16"

    def width(self, dim: int) -> int:
        """Elements that hold one row of `dim` numbers."""
        return -(-dim // self.per_byte)

    @property
    def scale_width(self) -> int:
        """Elements of one row of dynamic scales: the scale and, where there is one, the minimum."""
        return 2 if self.has_minimum else 1

    @property
    def write(self) -> str:
        """The operation that fills the cache."""
        return f"kv_write_{self.name}"


KV_FORMATS: Final[Mapping[str, KVFormat]] = MappingProxyType(
    {
        f.name: f
        for f in (
            KVFormat("int8", "int8", 127.0),
            KVFormat("float8_e4m3fn", "float8_e4m3fn", 448.0),
            KVFormat("int4_zp", "uint8", 15.0, per_byte=2, has_minimum=True),
        )
    }
)
# Spellings of other projects.
KV_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int4": "int4_zp"}
)


def kv_format(name: str) -> KVFormat | None:
    """The format of that name; None for "auto" and "", which keep the model's own numbers."""
    if name in ("", "auto"):
        return None
    found = KV_FORMATS.get(KV_ALIASES.get(name, name))
    if found is None:
        raise ConfigError(
            f"unknown KV cache format {name!r}; possible: auto, {', '.join(KV_FORMATS)}; "
            "choose one with --kv-cache-dtype"
        )
    return found
