"""Products of packed matrices against numpy's of what the packed matrix stands for."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import F32, address, from_bf16, to_bf16
from fd_cpu import _native

# kind, group, and the relative error that rounding activations (bfloat16, int8) may cause.
FORMATS = [
    pytest.param(0, 0, 2e-6, id="f32"),
    pytest.param(1, 0, 6e-3, id="bf16"),
    pytest.param(5, 0, 6e-3, id="bf16-coded"),
    pytest.param(2, 0, 1.5e-2, id="int8"),
    pytest.param(2, 64, 1.5e-2, id="int8-64"),
    pytest.param(3, 0, 1.5e-2, id="int4"),
    pytest.param(3, 32, 1.5e-2, id="int4-32"),
    pytest.param(3, 128, 1.5e-2, id="int4-128"),
]


PACKER = _native.Runtime(2, [], "")
CODED = 5


def packed(kind, group, weight, gated=False):
    if kind == CODED:
        bits = to_bf16(weight)
        matrix = PACKER.code_rows(*bits.shape, address(bits), bits.shape[1], gated)
    else:
        matrix = _native.make_packed(kind, *weight.shape, group, gated)
        PACKER.set_rows(matrix, weight.shape[0], address(weight), F32, weight.shape[1])
    meant = np.empty_like(weight)
    matrix.get_rows(0, weight.shape[0], address(meant))
    return matrix, meant


def product(runtime, matrix, x, rows, bias=None, norm=None, residual=None):
    y = np.empty((x.shape[0], rows), np.float32)
    runtime.linear(
        *(matrix, address(x), F32, x.shape[0], x.shape[1]),
        *(0 if norm is None else address(norm), 1e-5),
        *(0 if bias is None else address(bias), 0 if residual is None else address(residual)),
        *(address(y), F32, rows),
    )
    return y


def error(got, wanted):
    return np.abs(got - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 16, 20, 33, 130])
def test_product_of_odd_sizes(runtime, kind, group, limit, num_rows):
    rng = np.random.default_rng(num_rows)
    weight = rng.standard_normal((90, 3 * group or 101)).astype(np.float32) * 0.05
    x = rng.standard_normal((num_rows, weight.shape[1])).astype(np.float32)
    bias, residual = rng.standard_normal(90).astype(np.float32), rng.standard_normal((num_rows, 90))
    residual = residual.astype(np.float32)
    matrix, meant = packed(kind, group, weight)
    got = product(runtime, matrix, x, 90, bias, residual=residual)
    assert error(got, x @ meant.T + bias + residual) < limit


@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
@pytest.mark.parametrize("num_outputs", [1, 8, 16, 17, 64])
def test_fewer_outputs_than_a_panel_has(runtime, kind, group, limit, num_outputs):
    """Threads divide rows then; routers are such products."""
    rng = np.random.default_rng(num_outputs)
    weight = rng.standard_normal((num_outputs, 256)).astype(np.float32)
    x = rng.standard_normal((37, 256)).astype(np.float32)
    bias = rng.standard_normal(num_outputs).astype(np.float32)
    matrix, meant = packed(kind, group, weight)
    for num_rows in (1, 3, 37):
        got = product(runtime, matrix, x[:num_rows], num_outputs, bias)
        wanted = x[:num_rows] @ meant.T + bias
        assert np.abs(got - wanted).max() < 48 * limit, "sums of 256 numbers are some 16 to 48"


def test_product_of_no_rows_writes_nothing(runtime):
    matrix, _ = packed(2, 0, np.ones((64, 64), np.float32))
    y = np.full((1, 64), 7, np.float32)
    runtime.linear(matrix, address(y), F32, 0, 64, 0, 0.0, 0, 0, address(y), F32, 64)
    assert (y == 7).all()


@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
def test_gate_and_norm_around_the_product(runtime, kind, group, limit):
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((2 * 45, 128)).astype(np.float32) * 0.2
    x = rng.standard_normal((6, 128)).astype(np.float32) * 3
    norm = rng.standard_normal(128).astype(np.float32)
    matrix, meant = packed(kind, group, weight, gated=True)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * norm
    both = normed @ meant.T
    gate, up = both[:, :45], both[:, 45:]
    wanted = gate / (1 + np.exp(-gate)) * up
    assert error(product(runtime, matrix, x, 45, norm=norm), wanted) < 2 * limit


@pytest.mark.parametrize("num_rows", [1, 6, 40])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, CODED])
def test_the_likeliest_output_of_a_product(runtime, kind, num_rows):
    """All logits are negative, so that outputs that only pad a panel would win; the first of equals
    does."""
    rng = np.random.default_rng(num_rows)
    weight = -rng.random((1100, 64)).astype(np.float32) - 0.1
    # The last one is in a panel that threads take turns for.
    weight[[600, 777, 1099]] = weight[600] * 0.3
    x = rng.random((num_rows, 64)).astype(np.float32)
    x[num_rows // 2, 3] = np.nan
    matrix, meant = packed(kind, 0, weight)
    ids, peaks = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
    runtime.greedy_linear(
        *(matrix, address(x), F32, num_rows, 64, 0, address(ids), address(peaks)),
    )
    broken = np.arange(num_rows) == num_rows // 2
    assert (ids == np.where(broken, 0, 600)).all() and (np.isnan(peaks) == broken).all()
    wanted = (np.nan_to_num(x) @ meant.T).max(-1)
    assert np.abs(peaks - wanted)[~broken].max(initial=0) < 1.5e-2 * np.abs(wanted).max()


@pytest.mark.parametrize(("kind", "bits"), [(2, 8), (3, 4)])
def test_integers_are_kept_exactly(kind, bits):
    rng = np.random.default_rng(bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    values = rng.integers(low, high, (70, 96), dtype=np.int8)
    scales = rng.uniform(-1, 1, (70, 3)).astype(np.float16).astype(np.float32)
    matrix = _native.make_packed(kind, 70, 96, 32, False)
    PACKER.set_quantized_rows(matrix, 70, address(values), address(scales), False)
    meant = np.empty((70, 96), np.float32)
    matrix.get_rows(0, 70, address(meant))
    assert np.array_equal(meant, values * np.repeat(scales, 32, axis=1))


@pytest.mark.parametrize("width", [96, 101])
def test_pairs_of_four_bits_are_unpacked_in_order(width):
    rng = np.random.default_rng(width)
    values = rng.integers(0, 16, (70, width + width % 2), dtype=np.uint8)
    pairs = np.ascontiguousarray(values[:, ::2] | values[:, 1::2] << 4)
    group = 32 if width % 32 == 0 else 0
    scales = rng.random((70, width // group if group else 1)).astype(np.float32)
    if group:  # as files have them
        scales = (scales * 1e-6 ** rng.random(scales.shape)).astype(np.float16).astype(np.float32)
    matrix = _native.make_packed(3, 70, width, group, False)
    PACKER.set_quantized_rows(matrix, 70, address(pairs), address(scales), True)
    meant = np.empty((70, width), np.float32)
    matrix.get_rows(0, 70, address(meant))
    wide = np.repeat(scales, group or width, axis=1)
    assert np.array_equal(meant, (values[:, :width].astype(np.float32) - 8) * wide)


def test_not_a_number_reaches_the_result(runtime):
    weight = np.ones((64, 64), np.float32)
    x = np.ones((2, 64), np.float32)
    x[1, 5] = np.nan
    for kind in (0, 1, 2, 3, CODED):
        matrix, _ = packed(kind, 0, weight)
        got = product(runtime, matrix, x, 64)
        assert np.isfinite(got[0]).all() and np.isnan(got[1]).all(), kind


def test_bfloat16_values_survive_packing():
    rng = np.random.default_rng(3)
    weight = to_bf16(rng.standard_normal((33, 50)))
    matrix = _native.make_packed(1, 33, 50, 0, False)
    PACKER.set_rows(matrix, 33, address(weight), 1, 50)
    meant = np.empty((33, 50), np.float32)
    matrix.get_rows(0, 33, address(meant))
    assert np.array_equal(meant, from_bf16(weight))


def test_an_indivisible_group_is_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        _native.make_packed(3, 64, 128, 48, False)


def test_an_unknown_instruction_set_is_refused_with_the_possible_ones():
    with pytest.raises(ValueError, match="possible: scalar"):
        _native.Runtime(1, [], "mmx")
