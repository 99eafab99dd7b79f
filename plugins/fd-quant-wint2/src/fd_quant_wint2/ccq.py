"""CCQ, the 2-bit layout of ERNIE-4.5-300B-A47B-2Bits (arXiv 2507.07145).

A byte stands for four inputs of one output: code = floor(byte * code_scale + code_zero + 0.5), and
input j of the four is the 6-bit window of the code at bit 9 - 3 j, minus 32: neighbouring windows
share three bits. Scales have two levels: 4 bits for 64 inputs, times one number for the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

GROUP: Final = 64
TOGETHER: Final = 4
_SHIFTS: Final = (9, 6, 3, 0)
_MASK: Final = 63
_OFFSET: Final = 32
_MAX_LOCAL: Final = 15
_QUADS_AT_ONCE: Final = 16384
# Affine maps of bytes to codes that did best in a search on a Gaussian source, and tries around the
# scale that fits a group's deviation.
AFFINES: Final = ((120.941, -55.783), (121.774, 173.963), (119.946, 487.61), (120.942, 420.438))
_TRIES: Final = (0.82, 0.91, 1.0, 1.1)


def dequantize(weight: PackedWeight) -> Tensor:
    """[N, K] or [E, N, K] float32."""
    stored = weight.tensors["weight"]
    xp = namespace(stored)
    scale, zero = (weight.tensors[n].float().unsqueeze(-2) for n in ("code_scale", "code_zero"))
    code = (stored.float() * scale + zero + 0.5).floor().to(xp.int32)
    parts = [
        xp.bitwise_and(xp.right_shift(code, shift), _MASK).float() - _OFFSET for shift in _SHIFTS
    ]
    lead, rows, columns = list(stored.shape[:-2]), stored.shape[-2], stored.shape[-1]
    numbers = xp.stack(parts, -2).reshape([*lead, rows * TOGETHER, columns])  # [K, N]
    local = weight.tensors["scale"]
    nibbles = xp.stack((xp.right_shift(local, 4), xp.bitwise_and(local, _MAX_LOCAL)), -2)
    nibbles = nibbles.reshape([*lead, 2 * local.shape[-2], columns]).float()
    wide = xp.repeat_interleave(nibbles, GROUP, len(lead))[..., : rows * TOGETHER, :]
    values = numbers * (wide * weight.tensors["super_scale"].float().unsqueeze(-2))
    return values.transpose(-1, -2).contiguous()


def windows(code_scale: float, code_zero: float) -> np.ndarray:
    """[256, 4] float32: what each byte means, before scales."""
    byte = np.arange(256, dtype=np.float32)
    code = np.floor(byte * np.float32(code_scale) + np.float32(code_zero) + np.float32(0.5))
    whole = code.astype(np.int32)
    return np.stack([((whole >> s) & _MASK) - _OFFSET for s in _SHIFTS], 1).astype(np.float32)


def encode(weight: np.ndarray) -> dict[str, np.ndarray]:
    """Checkpoint tensors of a weight [N, K], K a multiple of 128: for each output the affine map,
    for each group the scale and for each four inputs the byte with the least error, by trying."""
    rows, count = weight.shape
    groups = weight.reshape(rows, count // GROUP, GROUP).astype(np.float32)
    deviation = np.maximum(np.sqrt((groups**2).mean(axis=2)), 1e-12)  # [N, G]
    books = [windows(*affine) for affine in AFFINES]
    spread = float(np.mean([book.std() for book in books]))
    # The largest group of an output gets the largest local scale.
    super_scale = (deviation.max(axis=1) / spread * max(_TRIES) / _MAX_LOCAL).astype(np.float32)
    best = np.full(rows, np.inf, np.float32)
    found: dict[str, np.ndarray] = {
        "code_scale": np.empty(rows, np.float32),
        "code_zp": np.empty(rows, np.float32),
        "weight": np.empty((rows, count // TOGETHER), np.uint8),
        "local": np.empty((rows, count // GROUP), np.uint8),
    }
    for affine, book in zip(AFFINES, books, strict=True):
        byte, local, error = _best_bytes(groups, deviation, super_scale, book, spread)
        better = error < best
        best = np.where(better, error, best)
        found["weight"][better], found["local"][better] = byte[better], local[better]
        found["code_scale"][better], found["code_zp"][better] = affine
    local = found.pop("local")
    packed = (local[:, 0::2] << 4) | local[:, 1::2]
    found["weight"] = np.ascontiguousarray(found["weight"].T)
    found["weight_scale"] = np.ascontiguousarray(packed.T)
    found["super_scales"] = super_scale
    return found


def _best_bytes(
    groups: np.ndarray,
    deviation: np.ndarray,
    super_scale: np.ndarray,
    book: np.ndarray,
    spread: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes [N, K/4], local scales [N, G], squared error [N]) under one affine map."""
    rows, count = groups.shape[:2]
    quads = groups.reshape(rows, count, GROUP // TOGETHER, TOGETHER)
    norm = (book**2).sum(axis=1)
    best = np.full((rows, count), np.inf, np.float32)
    local_best = np.ones((rows, count), np.uint8)
    byte_best = np.zeros((rows, count, GROUP // TOGETHER), np.uint8)
    step = max(1, _QUADS_AT_ONCE * TOGETHER // (count * GROUP))
    for wider in _TRIES:
        local = np.clip(np.round(deviation / spread * wider / super_scale[:, None]), 1, _MAX_LOCAL)
        scale = (local * super_scale[:, None]).astype(np.float32)[:, :, None]
        for start in range(0, rows, step):
            part = slice(start, start + step)
            unit = (quads[part] / scale[part][..., None]).reshape(-1, TOGETHER)
            distance = norm - 2 * unit @ book.T
            byte = distance.argmin(axis=1)
            error = distance[np.arange(len(byte)), byte] + (unit**2).sum(axis=1)
            total = (
                error.reshape(-1, count, GROUP // TOGETHER).sum(axis=2) * scale[part][..., 0] ** 2
            )
            better = total < best[part]
            best[part][better] = total[better]
            local_best[part][better] = local[part][better]
            byte_best[part][better] = byte.reshape(-1, count, GROUP // TOGETHER)[better]
    return byte_best.reshape(rows, -1), local_best, best.sum(axis=1)
