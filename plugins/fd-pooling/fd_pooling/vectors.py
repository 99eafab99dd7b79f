"""From what the engine pooled to what a caller asked for: cut, normalised, activated."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from fastdeploy_core.errors import InvalidRequest

from .settings import PoolingSettings


def check_dimensions(settings: PoolingSettings, dimensions: int | None) -> None:
    """InvalidRequest unless so many first dimensions are an embedding of this model."""
    if dimensions is None or dimensions == settings.width:
        return
    known = settings.dimensions
    if not known:
        raise InvalidRequest(
            f"dimensions {dimensions} is not possible: this model was not trained for shorter "
            f"embeddings (Matryoshka), its own have {settings.width}; an operator who knows better "
            "starts the server with --hf-overrides '{\"is_matryoshka\": true}'",
            param="dimensions",
        )
    if not 0 < dimensions <= settings.width or (0 not in known and dimensions not in known):
        possible = f"1 to {settings.width}" if 0 in known else ", ".join(map(str, known))
        raise InvalidRequest(
            f"dimensions {dimensions} is not possible; possible: {possible}", param="dimensions"
        )


def finished(
    settings: PoolingSettings,
    pooled: bytes,
    *,
    dimensions: int | None = None,
    is_raw: bool | None = None,
) -> np.ndarray:
    """[width or dimensions] float32. is_raw: without norm and activation; None: as configured."""
    vector = np.frombuffer(pooled, dtype=np.float32).astype(np.float64)
    if settings.task == "embed":
        vector = vector[:dimensions]  # first, so that what is left has length 1
        if settings.normalize if is_raw is None else not is_raw:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    elif not is_raw:
        vector = activated(settings.activation, vector)
    return vector.astype(np.float32)


def activated(name: str, x: np.ndarray) -> np.ndarray:
    """x: [width] float64."""
    if name == "sigmoid":
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
    if name == "softmax":
        shifted = np.exp(x - x.max())
        return np.asarray(shifted / shifted.sum())
    if name == "tanh":
        return np.asarray(np.tanh(x))
    return np.asarray(np.maximum(x, 0.0)) if name == "relu" else x


def cosine(one: np.ndarray, two: np.ndarray) -> float:
    """Of two vectors."""
    one, two = one.astype(np.float64), two.astype(np.float64)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / max(lengths, 1e-12)


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """A list of numbers, or base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
