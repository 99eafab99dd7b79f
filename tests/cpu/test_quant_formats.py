"""Packing, rounding and the meaning of the internal formats, against loops over plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core import tensor
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight, pack_int4, unpack_int4
from fastdeploy_testing.conformance.test_quantized_ops import make_packed

FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


def host(x):
    return np.array(tensor.namespace(x).to_numpy(x))


def numbers(seed, *shape, high=16):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint8)


@FEW
@given(rows=st.integers(1, 9), count=st.integers(1, 33), lead=st.integers(0, 2))
def test_int4_pairs_come_back_for_odd_widths(xp, rows, count, lead):
    values = numbers(rows * 100 + count, *([3] * lead), rows, count)
    packed = pack_int4(xp.from_numpy(values.copy()))
    assert tuple(packed.shape) == (*values.shape[:-1], -(-count // 2))
    assert np.array_equal(host(unpack_int4(packed, count)), values)
    low = host(packed)[..., 0] & 15
    assert np.array_equal(low, values[..., 0])  # the even input lies low


def packed_weight(xp, name, weight, group_size=0):
    """A PackedWeight of a float32 [N, K] array."""
    return make_packed(xp, name, xp.from_numpy(weight.copy()), group_size)


# Largest relative squared error on Gaussian numbers: known levels of these formats, a little above.
LEVELS = {"wint8": 1e-4, "w8a8": 1e-4, "wint4": 0.0145, "w4a8": 0.0145, "block": 8e-4, "wfp8": 8e-4}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 130), (129, 257)], ids=str)
def test_rounding_keeps_its_promise_for_odd_shapes(xp, name, shape):
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    packed = packed_weight(xp, name, weight)
    got = host(packed.dequantize())
    assert got.shape == weight.shape and got.dtype == np.float32
    level = next(v for k, v in LEVELS.items() if name.startswith(k))
    assert ((got - weight) ** 2).sum() <= level * (weight**2).sum()


@pytest.mark.parametrize("name", ["wint8", "wint4", "wint4_zp"])
@pytest.mark.parametrize("group", [2, 16, 64])
def test_groups_have_their_own_scales(xp, name, group):
    weight = np.random.default_rng(2).standard_normal((6, 128)).astype(np.float32)
    weight *= np.repeat(10.0 ** np.arange(128 // group)[None] % 7 + 0.1, group, 1)
    packed = packed_weight(xp, name, weight, group)
    stored = {k: host(v) for k, v in packed.tensors.items()}
    expected = np.empty_like(weight)
    for n in range(6):
        for k in range(128):
            if name == "wint8":
                q = float(stored["weight"][n, k])
            else:
                q = float(stored["weight"][n, k // 2] >> (4 * (k % 2)) & 15) - 8
            expected[n, k] = q * stored["scale"][n, k // group]
    assert np.allclose(host(packed.dequantize()), expected, rtol=1e-6)


def test_blocks_of_fp8_have_one_scale_each(xp):
    weight = np.ones((200, 300), np.float32)
    weight[130:, 260:] = 448 * 4
    packed = packed_weight(xp, "block_fp8", weight)
    scale = host(packed.tensors["scale"])
    assert scale.shape == (2, 3)
    assert scale[1, 2] == pytest.approx(4) and scale[0, 0] == pytest.approx(1 / 448)
    assert np.allclose(host(packed.dequantize()), weight, rtol=0.07)


def test_rows_of_zeros_stay_zero_with_usable_scales(xp):
    weight = np.zeros((4, 256), np.float32)
    for name in FORMATS:
        packed = packed_weight(xp, name, weight)
        assert host(packed.tensors["scale"]).all() and not host(packed.dequantize()).any()


def test_int4_clips_where_the_error_is_least(xp):
    """Per output on a Gaussian: the best clip is at 0.012, the largest magnitude at 0.027."""
    weight = np.random.default_rng(3).standard_normal((64, 4096)).astype(np.float32)
    got = host(packed_weight(xp, "wint4", weight).dequantize())
    assert ((got - weight) ** 2).mean() < 0.0132


def test_int8_activations_are_rounded_per_token(xp):
    x = np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32)
    x[2] *= 1000
    x[3] = 0
    weight = packed_weight(xp, "w8a8", np.ones((8, 96), np.float32))
    got = host(weight.activate(xp.from_numpy(x.copy())))
    for row in range(5):
        scale = max(np.abs(x[row]).max() / np.float32(127), 1e-12)
        assert np.allclose(got[row], np.round(x[row] / scale) * scale, rtol=1e-5, atol=1e-7)
    static = packed_weight(xp, "w8a8_static", np.ones((8, 96), np.float32))
    got = host(static.activate(xp.from_numpy(x.copy())))
    assert np.abs(got).max() == pytest.approx(127 * 0.03)


def test_fp8_activations_are_cut_not_lost(xp):
    """Beyond the largest fp8 number there is only NaN."""
    x = np.full((2, 130), 1e30, np.float32)
    x[1] = 1
    for name in ("wfp8afp8", "block_fp8"):
        got = host(
            packed_weight(xp, name, np.ones((4, 130), np.float32)).activate(xp.from_numpy(x))
        )
        assert np.isfinite(got).all() and np.allclose(got, x, rtol=0.07)
    static = packed_weight(xp, "wfp8afp8_static", np.ones((4, 130), np.float32))
    assert np.isfinite(host(static.activate(xp.from_numpy(x)))).all()


def test_block_activations_have_a_scale_for_each_128_inputs(xp):
    x = np.ones((1, 256), np.float32)
    x[0, 0] = 1e6
    got = host(
        packed_weight(xp, "block_fp8", np.ones((4, 256), np.float32)).activate(xp.from_numpy(x))
    )
    assert np.allclose(got[0, 128:], 1, rtol=1e-6) and not np.allclose(got[0, 1:128], 1, rtol=0.1)


def test_experts_are_slices_of_one_weight(xp):
    weight = np.random.default_rng(7).standard_normal((3, 10, 64)).astype(np.float32)
    for name in FORMATS:
        parts = [packed_weight(xp, name, one) for one in weight]
        held = {}
        for key in parts[0].tensors:
            tensors = [p.tensors[key] for p in parts]
            is_fp8 = tensors[0].dtype == xp.float8_e4m3fn
            bits = [t.view(xp.uint8) if is_fp8 else t for t in tensors]
            held[key] = xp.stack(bits).view(xp.float8_e4m3fn) if is_fp8 else xp.stack(bits)
        whole = PackedWeight(FORMATS[name], 10, 64, held, num_experts=3)
        if "static" not in name:
            assert np.array_equal(host(whole.dequantize())[1], host(parts[1].dequantize())), name
        assert np.array_equal(host(whole.expert(2).dequantize()), host(parts[2].dequantize()))


def test_bytes_of_formats(xp):
    """Bits per weight at 4096 inputs."""
    weight = np.ones((16, 4096), np.float32)

    def bits_of(name, group_size=0):
        tensors = packed_weight(xp, name, weight, group_size).tensors.values()
        return sum(xp.nbytes(tensor) for tensor in tensors) * 8 / weight.size

    bits = {name: bits_of(name) for name in FORMATS}
    assert bits["wint8"] == bits["w8a8"] == bits["wfp8"] == pytest.approx(8 + 32 / 4096)
    assert bits["wint4"] == bits["w4a8"] == pytest.approx(4 + 32 / 4096)
    assert bits_of("wint4", 128) == pytest.approx(4 + 32 / 128)
