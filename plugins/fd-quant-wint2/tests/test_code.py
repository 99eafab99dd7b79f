"""The trellis code: its golden strand, a decoder that goes bit by bit, and how well it codes."""

from __future__ import annotations

import numpy as np
import pytest
from fd_quant_wint2 import code, encoder, hadamard, ldlq
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core import tensor


@pytest.fixture(scope="module")
def xp(fd_tensor):
    return tensor.load(fd_tensor or tensor.available()[0])


def bit_by_bit(words: np.ndarray, bits: int) -> np.ndarray:
    """Doubled weights, exact integers, of one strand; nothing shared with code.py."""
    ring, width = 512 * bits, 2 * bits
    stream = [int(words[p // 32]) >> (p % 32) & 1 for p in range(ring)]
    found = []
    for symbol in range(256):
        end = width * (symbol + 1)
        x = sum(stream[(end - 16 + n) % ring] << n for n in range(16))
        product = x * 0x67EDF2EB % (1 << 32)
        b = [2 * (product >> (8 * n) & 255) - 255 for n in range(4)]
        found += [b[0] + b[1] - b[3], b[1] + b[2] + b[3]]
    return np.array(found)


def decoded(xp, words: np.ndarray, bits: int) -> np.ndarray:
    got = code.decode(xp.from_numpy(words.astype(np.uint32).view(np.int32).reshape(1, -1)), bits)
    return np.array(xp.to_numpy(got))[0]


def test_golden_strand(xp):
    words = (np.arange(32, dtype=np.uint64) * 2654435761 + 12345) % (1 << 32)
    doubled = np.round(decoded(xp, words, 2) * (2 * 128 / 1.03)).astype(np.int64)
    assert doubled[:8].tolist() == [453, 149, 143, -375, -123, -303, -399, -33]
    assert doubled[-4:].tolist() == [-15, -499, 195, -311]
    assert doubled.sum() == -108 and (doubled**2).sum() == 33_566_464
    assert np.array_equal(doubled, bit_by_bit(words, 2))


@settings(max_examples=12, deadline=None)
@given(bits=st.sampled_from([2, 3, 4]), seed=st.integers(0, 2**31))
def test_any_words_decode_as_bit_by_bit(xp, bits, seed):
    words = np.random.default_rng(seed).integers(0, 1 << 32, 16 * bits, np.uint64)
    spread = {2: 1.03, 3: 1.06, 4: 1.12}[bits]
    doubled = decoded(xp, words, bits) * (2 * 128 / spread)
    assert np.abs(doubled - bit_by_bit(words, bits)).max() < 1e-3


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_states_pack_and_come_back(xp, bits):
    rng = np.random.default_rng(bits)
    stream = rng.integers(0, 2, (5, 512 * bits))
    width = 2 * bits
    position = (width * (np.arange(256)[:, None] + 1) - 16 + np.arange(16)) % (512 * bits)
    states = (stream[:, position] << np.arange(16)).sum(-1).astype(np.uint16)
    words = code.pack_states(states, bits)
    assert words.shape == (5, 16 * bits) and words.dtype == np.int32
    got = code.unpack_states(xp.from_numpy(words), bits)
    assert np.array_equal(np.array(xp.to_numpy(got)), states)


def strands(count: int) -> np.ndarray:
    return np.random.default_rng(4242).standard_normal((count, 512)).astype(np.float32)


def error(x: np.ndarray, states: np.ndarray, bits: int) -> float:
    rounded = code.scaled_codebook(bits)[states].reshape(x.shape)
    return float(((rounded - x) ** 2).sum() / (x**2).sum())


@pytest.mark.parametrize(
    ("bits", "most", "bound"),
    [
        (2, 0.0705, 0.0625),
        pytest.param(3, 0.0196, 0.015625, marks=pytest.mark.slow),
        pytest.param(4, 0.0055, 0.00390625, marks=pytest.mark.slow),
    ],
)
def test_distance_to_the_rate_distortion_bound(bits, most, bound):
    """At 2 bits the best computed code known has 0.0680, Lloyd-Max 0.1175."""
    x = strands(192)
    got = error(x, encoder.encode(x, bits), bits)
    assert bound < got <= most, got


@pytest.mark.parametrize("bits", [2, 4])
def test_states_are_a_closed_ring(bits):
    states = encoder.encode(strands(3), bits).astype(np.uint32)
    width = 2 * bits
    assert np.array_equal(states & ((1 << (16 - width)) - 1), np.roll(states, 1, axis=1) >> width)


@pytest.mark.parametrize("bits", [2, 4])
def test_search_in_tensor_code_finds_as_good_a_path(xp, bits):
    x = strands(2)
    native = encoder.encode(x, bits)
    found = encoder._reversed_bits()[encoder._encode_tensor(xp, "cpu", x, bits)]
    assert error(x, found, bits) == pytest.approx(error(x, native, bits), rel=1e-4)


def test_progress_counts_every_weight():
    seen: list[int] = []
    encoder.encode(strands(70), 4, progress=seen.append)
    assert sum(seen) == 70 * 512 and len(seen) == 2
    assert encoder.encode(np.zeros((0, 512), np.float32), 2).shape == (0, 256)


@pytest.mark.parametrize("count", [128, 256, 512])
def test_transform_is_the_hadamard_matrix(xp, count):
    rows = np.arange(count)
    parity = np.array([[bin(i & j).count("1") % 2 for j in rows] for i in rows])
    expected = np.where(parity, -1.0, 1.0) / np.sqrt(count)
    got = hadamard.transform(xp.from_numpy(np.eye(count, dtype=np.float32)), count)
    assert np.abs(np.array(xp.to_numpy(got)) - expected).max() < 1e-6


def test_rotation_keeps_products_and_spreads_outliers(xp):
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 3, 896)).astype(np.float32)
    x[0, 5] = 500
    signs = xp.from_numpy(hadamard.random_signs(896, "a layer", 0))
    block = hadamard.block_size(896)
    assert (
        block == 128 and hadamard.block_size(8192) == 8192 and hadamard.block_size(8192, 512) == 512
    )
    turned = [hadamard.rotate(xp.from_numpy(a.copy()), signs, block) for a in (x, w)]
    a, b = (np.array(xp.to_numpy(t)) for t in turned)
    assert np.allclose(a @ b.T, x @ w.T, atol=1e-3)
    assert np.abs(a).max() < 60
    back = hadamard.rotate_back(turned[0], signs, block)
    assert np.allclose(np.array(xp.to_numpy(back)), x, atol=1e-4)
    assert not np.array_equal(hadamard.random_signs(896, "another", 0), np.array(signs))


def correlated(count: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    mixing = rng.standard_normal((count, count)) * 0.15 + np.eye(count)
    inputs = rng.standard_normal((3000, count)) @ mixing
    return (inputs.T @ inputs / 3000).astype(np.float32)


def test_error_feedback_lowers_the_error_of_outputs(xp):
    weight = np.random.default_rng(5).standard_normal((100, 64)).astype(np.float32)
    hessian = correlated(64).astype(np.float64)

    def rounded(h):
        words, scale = ldlq.quantize_rows(weight, 2, h)
        assert words.shape == (2, 8, 32) and scale.shape == (100,)
        flat = code.decode(xp.from_numpy(words.reshape(16, 32)), 2)
        rows = code.tiles_to_rows(flat.reshape([2, 8, 512]), 100, 64)
        return np.array(xp.to_numpy(rows)) * scale.astype(np.float32)[:, None]

    def outputs(w):
        return np.trace((weight - w) @ hessian @ (weight - w).T) / np.trace(
            weight @ hessian @ weight.T
        )

    plain, fed = outputs(rounded(None)), outputs(rounded(hessian))
    assert plain == pytest.approx(0.071, abs=0.02)
    assert fed < 0.75 * plain


def test_strands_are_tiles_of_64_outputs_by_8_inputs():
    rows = np.arange(128 * 16, dtype=np.float32).reshape(128, 16)
    tiles = ldlq.to_strands(rows)
    assert tiles.shape == (2, 2, 512)
    assert tiles[1, 0, 9] == rows[65, 1] and tiles[0, 1, 8 * 63] == rows[63, 8]
    assert np.array_equal(ldlq.from_strands(tiles), rows)
