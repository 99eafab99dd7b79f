"""The trellis code of two bits: products against a decoder that goes bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import address
from fd_cpu import _native
from test_products import error, product

TET2 = 4


def decoded(strands):
    """[N, K] of uint32 [N / 64, K / 8, 32]: every state from the ring's bits, every byte from the
    product."""
    tall, wide, _ = strands.shape
    found = np.empty((tall * 64, wide * 8))
    for tile in np.ndindex(tall, wide):
        ring = np.unpackbits(strands[tile].view(np.uint8), bitorder="little")
        for symbol in range(256):
            window = [int(ring[(4 * symbol - 12 + n) % 1024]) << n for n in range(16)]
            line = sum(window) * 0x67EDF2EB & 0xFFFFFFFF
            b = [(line >> 8 * n & 255) - 127.5 for n in range(4)]
            row, column = tile[0] * 64 + symbol // 4, tile[1] * 8 + symbol % 4 * 2
            found[row, column : column + 2] = b[0] + b[1] - b[3], b[1] + b[2] + b[3]
    return found * 1.03 / 128


def hadamard(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / len(matrix) ** 0.5


def trellis(rows, count, rotation, gated=False):
    """(packed, the numbers it stands for in the space of inputs that are not rotated)."""
    rng = np.random.default_rng(rows + count)
    strands = rng.integers(0, 1 << 32, (-(-rows // 64), count // 8, 32), dtype=np.uint32)
    scales = rng.uniform(0.5, 1.5, rows).astype(np.float32)
    signs = rng.choice(np.array([-1, 1], np.int8), count)
    matrix = _native.make_packed(TET2, rows, count, 0, gated)
    _native.set_tet(matrix, address(strands), address(scales), address(signs), rotation)
    rotated = decoded(strands)[:rows] * scales[:, None]
    meant = np.empty((rows, count), np.float32)
    matrix.get_rows(0, rows, address(meant))
    assert np.abs(meant - rotated).max() < 1e-5
    return matrix, rotated @ np.kron(np.eye(count // rotation), hadamard(rotation)) * signs


@pytest.mark.parametrize("num_rows", [1, 3, 17, 40])
@pytest.mark.parametrize(("rows", "count", "rotation"), [(90, 128, 128), (64, 96, 32), (70, 64, 8)])
def test_product(runtime, rows, count, rotation, num_rows):
    matrix, dense = trellis(rows, count, rotation)
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, count)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    assert error(product(runtime, matrix, x, rows, bias), x @ dense.T + bias) < 2e-2


def test_gate_and_norm_around_the_product(runtime):
    matrix, dense = trellis(2 * 64, 128, 128, gated=True)
    rng = np.random.default_rng(7)
    x, norm = rng.standard_normal((19, 128)).astype(np.float32) * 3, rng.standard_normal(128)
    norm = norm.astype(np.float32)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * norm
    gate, up = np.split(normed @ dense.T, 2, axis=1)
    wanted = gate / (1 + np.exp(-gate)) * up
    assert error(product(runtime, matrix, x, 64, norm=norm), wanted) < 2e-2


def test_not_a_number_reaches_the_result(runtime):
    matrix, _ = trellis(64, 128, 128)
    x = np.ones((2, 128), np.float32)
    x[1, 5] = np.nan
    got = product(runtime, matrix, x, 64)
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()


@pytest.mark.parametrize("count", [40, 1 << 16])
def test_other_numbers_of_inputs_are_refused(count):
    with pytest.raises(ValueError, match="multiples of 32 up to 32768"):
        _native.make_packed(TET2, 64, count, 0, False)
