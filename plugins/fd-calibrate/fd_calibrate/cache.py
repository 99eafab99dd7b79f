"""Static scales of a KV cache, from the values that calibration text wrote to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.kv_formats import KVFormat
    from fastdeploy_core.tensor import Tensor

_TINY = 1e-6


class CacheRanges:
    """Largest and smallest number of each head and channel, of the block that is running."""

    def __init__(self, xp: Any, kind: KVFormat | None) -> None:
        self._xp, self._kind = xp, kind
        self._low: list[np.ndarray] = []
        self._high: list[np.ndarray] = []

    def show(self, rows: tuple[Tensor, ...]) -> None:
        """rows: one [tokens, heads, dim] for each cache tensor."""
        if self._kind is None:
            return
        high = [np.array(self._xp.to_numpy(r.float())).max(axis=0) for r in rows]
        low = [np.array(self._xp.to_numpy(r.float())).min(axis=0) for r in rows]
        if not self._high:
            self._high, self._low = high, low
            return
        self._high = [np.maximum(a, b) for a, b in zip(self._high, high, strict=True)]
        self._low = [np.minimum(a, b) for a, b in zip(self._low, low, strict=True)]

    def tensors(self, prefix: str) -> dict[str, np.ndarray]:
        """Checkpoint tensors of the block's attention under FastDeploy 2.x's names; then starts
        again."""
        if self._kind is None or not self._high:
            return {}
        if len(self._high) != 2:
            raise ConfigError(
                "static cache scales are for keys and values; this model caches latent rows; "
                "possible: dynamic scales (leave out --kv-cache and serve with --kv-cache-dtype)"
            )
        found = {}
        for side, low, high in zip("kv", self._low, self._high, strict=True):
            name = f"{prefix}.cache{side}_matmul.activation"
            if self._kind.has_minimum:
                # FastDeploy's int4 runs from -7 to 7: low and high are mapped to these.
                step = np.maximum((high - low) / 14, _TINY)
                found[f"{name}_scale"] = step.reshape(-1)
                found[f"{name}_zero_point"] = (-7 - low / step).reshape(-1)
            else:
                peak = np.maximum(np.maximum(np.abs(low), np.abs(high)), _TINY)
                found[f"{name}_scale"] = peak.reshape(-1)
        self._high, self._low = [], []
        return {key: value.astype(np.float32) for key, value in found.items()}
