"""Sampling operations against independent numpy code, and the statistics of sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.reference import random
from fastdeploy_core.reference.ops import sampling as ops
from tests.torch_oracle import ask


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


def logits_of(rows, width, seed=0, spread=3.0):
    return (np.random.default_rng(seed).standard_normal((rows, width)) * spread).astype(np.float32)


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def chi_square_tail(statistic, freedom):
    """P(chi-square >= statistic), by Wilson and Hilferty's cube root; good far above 30 degrees."""
    cube = (statistic / freedom) ** (1 / 3)
    z = (cube - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def chi_square(seen, expected):
    """Tail probability of the counts, rare categories pooled."""
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    rare = int(np.searchsorted(np.cumsum(expected), 10)) + 1
    seen = np.append(seen[rare:], seen[:rare].sum())
    expected = np.append(expected[rare:], expected[:rare].sum())
    return chi_square_tail(float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1)


# -- filters ---------------------------------------------------------------------------------------


def kept_tokens(row, top_k, top_p, min_p):
    """What filter_logits shall keep, one token at a time, from the contract's words."""
    probability = softmax(row[None])[0]
    kept = [t for t in range(len(row)) if probability[t] >= min_p * probability.max()]
    kept.sort(key=lambda t: -row[t])
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        total = sum(probability[t] for t in kept)
        reached, count = 0.0, 0
        for token in kept:
            reached += probability[token]
            count += 1
            if reached >= top_p * total:
                break
        kept = kept[:count]
    return set(kept)


@pytest.mark.parametrize("width", [1, 7, 300, 3000])
def test_filters_keep_exactly_the_right_tokens_together(xp, width):
    choices = np.random.default_rng(width)
    rows = 40
    logits = logits_of(rows, width, width)
    top_k = choices.choice([0, 1, 2, 5, 40, 10**6], rows)
    top_p = choices.choice([1.0, 0.0, 0.1, 0.5, 0.9, 0.999], rows).astype(np.float32)
    min_p = choices.choice([0.0, 0.01, 0.2, 1.0], rows).astype(np.float32)
    got = ops.filter_logits(*(xp.tensor(a) for a in (logits, top_k, top_p, min_p)))
    got = xp.to_numpy(got)
    for i in range(rows):
        kept = np.isfinite(got[i])
        assert set(np.flatnonzero(kept)) == kept_tokens(logits[i], top_k[i], top_p[i], min_p[i])
        assert np.array_equal(got[i][kept], logits[i][kept])


def test_filters_equal_transformers(xp, tmp_path):
    choices = np.random.default_rng(1)
    rows = 60
    arrays = {
        "logits": logits_of(rows, 700, 1),
        "top_k": choices.choice([0, 1, 10, 300], rows),
        "top_p": choices.choice([1.0, 0.2, 0.7, 0.95], rows).astype(np.float32),
        "min_p": choices.choice([0.0, 0.02, 0.3], rows).astype(np.float32),
    }
    expected = ask("warpers", tmp_path, **arrays)["logits"]
    got = xp.to_numpy(ops.filter_logits(*(xp.tensor(a) for a in arrays.values())))
    assert np.array_equal(np.isfinite(got), np.isfinite(expected))


def test_top_p_of_a_flat_distribution_ranks_far(xp):
    logits = (np.arange(5000)[None] * np.float32(1e-4)).astype(np.float32)
    args = (np.array([0]), np.array([0.5], np.float32), np.array([0], np.float32))
    got = xp.to_numpy(ops.filter_logits(*(xp.tensor(a) for a in (logits, *args))))
    expected = len(kept_tokens(logits[0], 0, 0.5, 0.0))
    assert 2000 < expected < 2500 and abs(int(np.isfinite(got).sum()) - expected) <= 1


def test_equal_tokens_are_kept_together(xp):
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    got = ops.filter_logits(*(xp.tensor(a) for a in (logits, np.array([1, 2]), one, zero)))
    assert np.isfinite(xp.to_numpy(got)).tolist() == [[False, True, True, False], [True] * 4]


def test_filters_respect_tokens_that_are_forbidden(xp):
    logits = np.full((1, 600), -np.inf, np.float32)
    logits[0, [3, 500]] = [1.0, 0.5]
    args = (np.array([50]), np.array([0.99], np.float32), np.array([0.01], np.float32))
    got = xp.to_numpy(ops.filter_logits(*(xp.tensor(a) for a in (logits, *args))))
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == [3, 500]


# -- penalties and masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_penalties_change_what_occurred_only(xp, dtype):
    rng = np.random.default_rng(0)
    logits = logits_of(3, 40)
    presence, frequency = np.array([0.5, 0, -1], np.float32), np.array([0.25, 0, 0.5], np.float32)
    repetition = np.array([1.5, 1.0, 0.7], np.float32)
    counts = (rng.integers(0, 4, (3, 40)) * (rng.random((3, 40)) < 0.3)).astype(dtype)
    seen = rng.random((3, 40)) < 0.3
    expected = logits.astype(np.float64)
    for row in range(3):
        for token in range(40):
            value = expected[row, token]
            if seen[row, token] or counts[row, token]:
                value = value / repetition[row] if value > 0 else value * repetition[row]
            if counts[row, token]:
                value -= presence[row] + frequency[row] * counts[row, token]
            expected[row, token] = value
    arrays = (logits.copy(), presence, frequency, repetition, counts, seen)
    got = xp.to_numpy(ops.apply_penalties(*(xp.tensor(a) for a in arrays)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    untouched = (counts == 0) & ~seen
    assert np.array_equal(got[untouched], logits[untouched]) and untouched.any()


@pytest.mark.parametrize("width", [1, 32, 33, 100])
def test_bitmask_forbids_unset_bits(xp, width):
    rng = np.random.default_rng(width)
    logits = logits_of(4, width)
    possible = rng.random((4, width)) < 0.5
    words = -(-width // 32)
    bits = np.zeros((4, words * 32), np.uint8)
    bits[:, :width] = possible
    mask = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    got = xp.to_numpy(ops.apply_bitmask(xp.tensor(logits), xp.tensor(mask.copy())))
    assert np.array_equal(np.isfinite(got), possible)
    assert np.array_equal(got[possible], logits[possible])


def test_greedy_takes_the_first_of_equals(xp):
    logits = logits_of(3, 5000)
    logits[0, [17, 4000]] = 50.0
    logits[1, :] = -np.inf
    assert ops.greedy(xp.tensor(logits)).tolist() == [17, 0, int(logits[2].argmax())]


def test_log_softmax_is_normalised(xp):
    logits = logits_of(3, 1000, spread=20)
    got = xp.to_numpy(ops.log_softmax(xp.tensor(logits)))
    np.testing.assert_allclose(got, np.log(softmax(logits)), rtol=1e-5, atol=1e-5)


# -- the random numbers ----------------------------------------------------------------------------


def uniforms(xp, seeds, positions, count):
    index = xp.arange(count).unsqueeze(0)
    arrays = (np.asarray(seeds, np.int64), np.asarray(positions, np.int64))
    return xp.to_numpy(random.uniforms(xp, *(xp.tensor(a) for a in arrays), index))


def reference_bits(seed, position, index):
    """The definition in Python integers of unlimited size."""
    mask = 2**64 - 1

    def signed(x):
        x &= mask
        return x - 2**64 if x >= 2**63 else x

    def mix(x):
        x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
        x = signed((x ^ (x >> 27)) * 0x94D049BB133111EB)
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix(signed(mix(signed(seed + golden)) + position * golden))
    own = mix(signed(index * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D))
    x = signed((own ^ key) * 0xFF51AFD7ED558CCD)
    x = signed((x ^ (x >> 32)) * 0xC4CEB9FE1A85EC53)
    return (x >> 24) & (2**40 - 1)


def test_hash_is_the_same_in_every_library(xp):
    """Equal to a definition outside both libraries, so torch and paddle draw the same."""
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    positions = np.array([0, 1, 7, 4095, 2**33, 5])
    index = np.array([0, 1, 2, 31, 4095, 151935])
    got = random.random_bits(
        xp, xp.tensor(seeds), xp.tensor(positions), xp.tensor(index).unsqueeze(0)
    )
    expected = [
        [reference_bits(int(s), int(p), int(i)) for i in index]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected


def test_smallest_and_largest_numbers_are_safe(xp):
    class Extremes:
        """A hash that returns the ends of its range."""

        @staticmethod
        def bits(xp, seeds, positions, index):
            return xp.tensor([[0, 2**40 - 1]])

    original = random.random_bits
    random.random_bits = Extremes.bits
    try:
        empty = xp.tensor([0])
        times = xp.to_numpy(random.exponential(xp, empty, empty, empty.unsqueeze(0)))
    finally:
        random.random_bits = original
    assert np.isfinite(times).all() and (times > 0).all() and times[0, 0] < 1e-12


# Seeds and positions as they occur: counters, equal values, random 64-bit numbers.
STREAMS = {
    "indices": lambda xp: uniforms(xp, [12345], [7], 200_000)[0],
    "positions": lambda xp: uniforms(xp, [1] * 20_000, np.arange(20_000), 10)[:, 3],
    "seeds": lambda xp: uniforms(xp, np.arange(20_000), [0] * 20_000, 10)[:, 0],
    "seeds far apart": lambda xp: uniforms(xp, np.arange(20_000) << 32, [9] * 20_000, 10)[:, 9],
}


def uniformity(numbers):
    seen = np.bincount((numbers * 100).astype(int).clip(0, 99), minlength=100)
    return chi_square(seen, np.full(100, len(numbers) / 100))


def independence(a, b):
    cells = (a * 10).astype(int).clip(0, 9) * 10 + (b * 10).astype(int).clip(0, 9)
    return chi_square(np.bincount(cells, minlength=100), np.full(100, len(a) / 100))


@pytest.mark.parametrize("stream", STREAMS)
def test_numbers_are_uniform_and_neighbours_independent(xp, stream):
    numbers = STREAMS[stream](xp)
    assert 1e-4 < uniformity(numbers) < 1 - 1e-4
    for lag in (1, 2, 16):
        assert independence(numbers[:-lag:2], numbers[lag::2][: len(numbers[:-lag:2])]) > 1e-4


def test_streams_of_different_seeds_and_positions_are_independent(xp):
    rows = uniforms(xp, [1, 2, 1, -1], [5, 5, 6, 5], 100_000)
    for i in range(4):
        for j in range(i):
            assert independence(rows[i], rows[j]) > 1e-4
            assert abs(np.corrcoef(rows[i], rows[j])[0, 1]) < 0.015
    # Position p of one seed must not repeat position p + 1 of another.
    assert len(np.unique(rows)) > 390_000


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62])
def test_no_index_meets_a_position(xp, seed):
    """A hash of index xor position has cells where both cancel: that token then always wins."""
    cells = uniforms(xp, [seed] * 2000, np.arange(2000), 2000)
    expected = cells.size * 1e-5
    assert abs(int((cells < 1e-5).sum()) - expected) < 6 * math.sqrt(expected)
    assert cells.min() > 1e-9
    for shift in (-1, 0, 1):
        assert 1e-4 < uniformity(np.diagonal(cells, shift)) < 1 - 1e-4


def test_tests_of_the_hash_notice_a_weak_one(xp):
    """Controls: a multiplicative sequence, and rows that are shifts of each other."""
    weak = (np.arange(200_000) * 0.6180339887) % 1
    assert independence(weak[:-1:2], weak[1::2][: len(weak[:-1:2])]) < 1e-6
    row = uniforms(xp, [3], [3], 100_000)[0]
    assert independence(row, (row + 0.25) % 1) < 1e-6


# -- the draw --------------------------------------------------------------------------------------


def draw(xp, logits, seeds, positions, sample=ops.sample):
    arrays = (logits, np.asarray(seeds, np.int64), np.asarray(positions, np.int64))
    return xp.to_numpy(sample(*(xp.tensor(a) for a in arrays)))


def draw_many(xp, row, count, sample=ops.sample):
    """Positions 0 to 99 of many seeds, as requests would draw."""
    batch = 10_000
    tokens = [
        draw(
            xp,
            np.repeat(row[None], batch, 0),
            np.arange(start, start + batch) // 100 * 7919,
            np.arange(start, start + batch) % 100,
            sample,
        )
        for start in range(0, count, batch)
    ]
    return np.bincount(np.concatenate(tokens), minlength=len(row))


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_draws_follow_the_exact_distribution(xp, spread):
    row = logits_of(1, 60, 5, spread)[0]
    count = 200_000
    tail = chi_square(draw_many(xp, row, count), count * softmax(row[None])[0])
    assert 1e-4 < tail < 1 - 1e-4


def test_filtered_draws_follow_the_renormalised_distribution(xp):
    row = logits_of(1, 600, 6, 2.0)[0]
    row[20:] = -np.inf
    count = 100_000
    seen = draw_many(xp, row, count)
    assert seen[20:].sum() == 0
    assert chi_square(seen[:20], count * softmax(row[None, :20])[0]) > 1e-4


def test_test_of_the_distribution_notices_a_biased_draw(xp):
    """Controls: a uniform number with few bits, Gumbel noise of the wrong scale, a small bias."""
    row = logits_of(1, 60, 5, 1.0)[0]
    count, expected = 200_000, 200_000 * softmax(row[None])[0]

    def few_bits(logits, seeds, positions):
        index = xp.arange(logits.shape[1]).unsqueeze(0)
        bits = xp.right_shift(random.random_bits(xp, seeds, positions, index), 36)
        times = -xp.log((bits.to(xp.float32) + 0.5) / 16)
        return xp.argmax(logits - xp.log(times), -1)

    def cooler(logits, seeds, positions):
        return ops.sample(logits * 1.03, seeds, positions)

    biased = row.copy()
    biased[int(row.argmax())] += 0.08
    assert chi_square(draw_many(xp, row, count, few_bits), expected) < 1e-6
    assert chi_square(draw_many(xp, row, count, cooler), expected) < 1e-6
    assert chi_square(draw_many(xp, biased, count), expected) < 1e-6


def test_draw_is_the_same_alone_and_in_a_crowd(xp):
    rng = np.random.default_rng(0)
    logits = logits_of(70, 5000)
    seeds, positions = rng.integers(-(2**63), 2**63 - 1, 70), rng.integers(0, 9000, 70)
    crowd = draw(xp, logits, seeds, positions)
    for i in (0, 1, 35, 69):
        assert draw(xp, logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0] == crowd[i]
    order = rng.permutation(70)
    assert np.array_equal(draw(xp, logits[order], seeds[order], positions[order]), crowd[order])


def test_filtered_rows_draw_as_if_every_token_raced(xp):
    """The shortcut over candidates gives the winner of the full race."""
    rng = np.random.default_rng(1)
    logits = logits_of(50, 2000)
    logits[rng.random((50, 2000)) < 0.97] = -np.inf
    logits[7] = -np.inf
    logits[7, 1999] = 0.0
    seeds, positions = rng.integers(0, 2**62, 50), np.arange(50)
    short = draw(xp, logits, seeds, positions)
    wide = np.concatenate((logits, logits_of(1, 2000)))  # one full row: no shortcut
    full = draw(xp, wide, np.append(seeds, 1), np.append(positions, 1))
    assert np.array_equal(short, full[:50]) and short[7] == 1999


def test_seeds_and_positions_change_the_draw(xp):
    logits = np.zeros((200, 1000), np.float32)
    assert len(set(draw(xp, logits, np.arange(200), np.zeros(200)))) > 150
    assert len(set(draw(xp, logits, np.zeros(200), np.arange(200)))) > 150
    assert len(set(draw(xp, logits, np.zeros(200), np.zeros(200)))) == 1


def test_known_draws_stay_the_same(xp):
    """Tokens of a seed must not change between releases, machines or libraries."""
    logits = (np.arange(4096) * 37 % 101).astype(np.float32)[None].repeat(6, 0) / 20
    tokens = draw(xp, logits, [0, 0, 1, 1, -5, 2**62], [0, 1, 0, 1, 100, 7])
    assert tokens.tolist() == [595, 1487, 322, 532, 1561, 3720]


def test_no_rows(xp):
    empty = np.zeros((0, 10), np.float32)
    assert draw(xp, empty, [], []).shape == (0,)
    assert list(ops.greedy(xp.tensor(empty)).shape) == [0]
    args = (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))
    assert list(ops.filter_logits(*(xp.tensor(a) for a in (empty, *args))).shape) == [0, 10]
