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


def encoded(
    vector: np.ndarray, form: str, dtype: str = "float32", endianness: str = "native"
) -> Any:
    """A list of numbers; or base64 of numbers of the type and byte order asked for. `binary` and
    `ubinary`: which numbers are not negative, eight in an int8 or uint8, the first one highest."""
    if form == "base64":
        data = _numbers(vector, dtype)
        data = data.astype(data.dtype.newbyteorder(">" if endianness == "big" else "<"))
        return base64.b64encode(data.tobytes()).decode("ascii")
    if form in ("binary", "ubinary"):
        if vector.shape[-1] % 8:
            raise InvalidRequest(
                f"{form} embeddings need a multiple of 8 numbers, these have {vector.shape[-1]}",
                param="embedding_types",
            )
        packed = np.packbits(vector >= 0, axis=-1).astype(np.int64)
        return (packed - 128 if form == "binary" else packed).tolist()
    return vector.tolist()


def _numbers(vector: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return vector.astype(dtype)
    bits = np.ascontiguousarray(vector, dtype=np.float32).view(np.uint32)
    # The upper half, rounded to the nearest, ties to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
