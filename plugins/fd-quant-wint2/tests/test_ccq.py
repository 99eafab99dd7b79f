"""The published 2-bit layout against a decoder that follows its description byte by byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fd_quant_wint2 import ccq
from fd_quant_wint2.formats import CCQ

from fastdeploy_core import tensor
from fastdeploy_core.contracts.quant_formats import PackedWeight


@pytest.fixture(scope="module")
def xp(fd_tensor):
    return tensor.load(fd_tensor or tensor.available()[0])


def brute_force(weight, scale, super_scale, code_scale, code_zero) -> np.ndarray:
    """[N, K] float32: one byte after the other."""
    quarter, rows = weight.shape
    found = np.zeros((rows, 4 * quarter), np.float32)
    for n in range(rows):
        for k4 in range(quarter):
            raw = np.float32(weight[k4, n]) * code_scale[n] + code_zero[n] + np.float32(0.5)
            code = math.floor(raw)
            for j in range(4):
                k = 4 * k4 + j
                byte = int(scale[k // 128, n])
                local = byte >> 4 if (k // 64) % 2 == 0 else byte & 15
                number = ((code >> (9 - 3 * j)) & 63) - 32
                found[n, k] = np.float32(number) * (np.float32(local) * super_scale[n])
    return found


@pytest.mark.parametrize("shape", [(5, 128), (3, 384)], ids=str)
def test_every_byte_is_decoded_exactly(xp, shape):
    rows, count = shape
    rng = np.random.default_rng(rows)
    stored = {
        "weight": rng.integers(0, 256, (count // 4, rows)).astype(np.uint8),
        "scale": rng.integers(0, 256, (count // 128, rows)).astype(np.uint8),
        "super_scale": rng.uniform(1e-3, 2e-3, rows).astype(np.float32),
        "code_scale": rng.uniform(100, 128, rows).astype(np.float32),
        "code_zero": rng.uniform(-60, 100, rows).astype(np.float32),
    }
    held = {k: xp.from_numpy(v.copy()) for k, v in stored.items()}
    got = PackedWeight(CCQ, rows, count, held).dequantize()
    assert np.array_equal(np.array(xp.to_numpy(got)), brute_force(*stored.values()))
    lifted = {k: xp.stack([v, v]) for k, v in held.items()}
    both = PackedWeight(CCQ, rows, count, lifted, num_experts=2).dequantize()
    assert np.array_equal(np.array(xp.to_numpy(both))[1], np.array(xp.to_numpy(got)))


def test_encoder_comes_near_the_published_error(xp):
    """On a Gaussian source: CCQ 0.110 at best, Lloyd-Max 0.1175, a trellis 0.070."""
    weight = np.random.default_rng(7).standard_normal((24, 512)).astype(np.float32)
    weight *= np.linspace(0.5, 2, 24)[:, None]
    stored = ccq.encode(weight)
    held = {
        "weight": stored["weight"],
        "scale": stored["weight_scale"],
        "super_scale": stored["super_scales"],
        "code_scale": stored["code_scale"],
        "code_zero": stored["code_zp"],
    }
    tensors = {k: xp.from_numpy(np.ascontiguousarray(v)) for k, v in held.items()}
    got = np.array(xp.to_numpy(PackedWeight(CCQ, 24, 512, tensors).dequantize()))
    error = ((got - weight) ** 2).sum() / (weight**2).sum()
    assert 0.1 < error < 0.122
    assert np.array_equal(got, brute_force(*held.values()))
