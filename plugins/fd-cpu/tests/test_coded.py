"""Bfloat16 in twelve bits: nothing is lost, and products are those of plain bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import BF16, F32, address, from_bf16, to_bf16
from fd_cpu import _native
from test_products import CODED, PACKER, product

PLAIN = 1


def coded(weight, gated=False):
    """Of bfloat16 bits."""
    return PACKER.code_rows(*weight.shape, address(weight), weight.shape[1], gated)


def plain(weight, gated=False):
    matrix = _native.make_packed(PLAIN, *weight.shape, 0, gated)
    PACKER.set_rows(matrix, len(weight), address(weight), BF16, weight.shape[1])
    return matrix


def bits_of(matrix):
    rows = np.empty((matrix.outputs, matrix.inputs), np.float32)
    matrix.get_rows(0, matrix.outputs, address(rows))
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def weights(shape, seed=0):
    return to_bf16(np.random.default_rng(seed).standard_normal(shape) * 0.02)


@pytest.mark.parametrize("first", range(1, 256, 15))
def test_every_number_has_a_code_among_fifteen_exponents(first):
    exponents = np.arange(first, min(first + 15, 256))
    rest = np.arange(256)
    numbers = (rest >> 7 << 15 | rest & 127)[None] | exponents[:, None] << 7
    numbers = np.append(numbers, (rest >> 7 << 15) | rest & 127).astype(np.uint16)  # of exponent 0
    weight = np.resize(numbers, (64, len(numbers) // 64 + 1))
    matrix = coded(weight)
    assert matrix.num_patches == 0 and np.array_equal(bits_of(matrix), weight)


def test_every_number_may_be_a_patch():
    """Each bfloat16 once among 256 times as many usual weights, not numbers and infinities
    included."""
    rng = np.random.default_rng(5)
    weight = weights((4096, 4100))
    places = rng.choice(weight.size, 1 << 16, replace=False)
    weight.reshape(-1)[places] = np.arange(1 << 16, dtype=np.uint16)
    matrix = coded(weight)
    assert 50_000 < matrix.num_patches <= weight.size / 256
    assert np.array_equal(bits_of(matrix), weight)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(90, 101), (64, 128), (2, 1), (34, 33), (200, 6)])
def test_rows_of_odd_sizes_come_back(shape, gated):
    weight = weights(shape, seed=shape[0])
    matrix = coded(weight, gated)
    assert matrix.kind == CODED and np.array_equal(bits_of(matrix), weight)


def test_a_panel_takes_three_quarters_of_the_memory():
    weight = weights((1024, 1024))
    assert coded(weight).num_bytes < 0.76 * plain(weight).num_bytes


def test_exponents_that_spread_stay_as_they_are():
    spread = (np.arange(64 * 96, dtype=np.uint32) * 2654435761 >> 16).astype(np.uint16)
    assert coded(spread.reshape(64, 96)) is None


@pytest.mark.parametrize("num_rows", [1, 4, 7, 12, 13, 24, 25, 33, 130])
@pytest.mark.parametrize(("shape", "gated"), [((90, 101), False), ((200, 1030), True)])
def test_products_are_those_of_plain_bfloat16(runtime, shape, gated, num_rows):
    """Patches weigh most here: one left out, moved or added twice makes another result."""
    rng = np.random.default_rng(num_rows)
    weight = to_bf16(
        rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-15, 0, shape)
    )
    places = rng.choice(weight.size, weight.size // 400, replace=False)
    weight.reshape(-1)[places] = to_bf16(rng.uniform(500, 2000, len(places)))
    matrix = coded(weight, gated)
    assert matrix is not None and matrix.num_patches >= len(places)
    x = rng.standard_normal((num_rows, shape[1])).astype(np.float32)
    outputs = shape[0] // 2 if gated else shape[0]
    got, wanted = (product(runtime, m, x, outputs) for m in (matrix, plain(weight, gated)))
    assert np.abs(got - wanted).max() < 2e-6 * np.abs(wanted).max()
    exact = from_bf16(to_bf16(x)).astype(np.float64) @ from_bf16(weight).astype(np.float64).T
    if not gated:
        assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("num_rows", [1, 3, 9, 40])
def test_infinite_weights_reach_their_outputs_only(runtime, num_rows):
    weight = weights((130, 512))
    weight[7, 3], weight[77, 500], weight[129, 64] = 0x7F80, 0xFF80, 0x7FC1
    got = product(runtime, coded(weight), np.ones((num_rows, 512), np.float32), 130)
    assert (got[:, 7] == np.inf).all() and (got[:, 77] == -np.inf).all()
    assert np.isnan(got[:, 129]).all()
    assert np.isfinite(np.delete(got, [7, 77, 129], axis=1)).all()


def test_patches_of_another_matrix_are_noticed():
    weight = weights((64, 4096))
    weight[5, 17] = 0x7F80
    matrix = coded(weight)
    assert matrix.num_patches > 0 and matrix.has_sound_patches
    (_, _), (where, size) = matrix.memory
    patches = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * (size // 4)).from_address(where))
    patches[4] += 4096  # after two starts: the first patch's input
    assert not matrix.has_sound_patches


def test_rows_are_coded_alike_by_any_number_of_threads():
    weight = weights((500, 300), seed=9)
    one = _native.Runtime(1, [], "").code_rows(500, 300, address(weight), 300, True)
    for (where, size), (other, _) in zip(one.memory, coded(weight, True).memory, strict=True):
        arrays = (
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(w))
            for w in (where, other)
        )
        assert np.array_equal(*arrays)


def test_embedding_reads_rows_of_a_coded_head(runtime):
    weight = weights((300, 64))
    weight[299, 63] = 0xFF80
    matrix, ids = coded(weight), np.array([299, 0, 150, -1, 300])
    y = np.empty((5, 64), np.float32)
    runtime.embedding(address(ids), 0, matrix, address(y), F32, 5, 300, 64)
    assert np.array_equal(y[:3], from_bf16(weight[ids[:3]])) and not y[3:].any()
