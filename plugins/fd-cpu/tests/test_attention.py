"""Paged attention, experts, greedy search and captured plans against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import BF16, F32, address, from_bf16, to_bf16
from fd_cpu import _native

KV_HEADS = 2


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotated(x, positions, table, interleaved):
    width, half = table.shape[1], table.shape[1] // 2
    cos, sin = table[positions, :half][:, None], table[positions, half:][:, None]
    first = slice(0, width, 2) if interleaved else slice(half)
    second = slice(1, width, 2) if interleaved else slice(half, width)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def stored(values, kind):
    return np.ascontiguousarray(values) if kind == F32 else to_bf16(values)


def rounded(x, factors):
    """What an int8 cache holds of [tokens, heads, dim]: a scale for each head and token, or
    channel."""
    if factors is None:
        peak = np.abs(x).max(-1, keepdims=True) / 127
        factors = np.maximum(peak, 1e-7).astype(np.float16).astype(np.float32)
    return np.clip(np.round(x / factors), -127, 127) * factors


@pytest.mark.parametrize(
    ("cache", "window", "chunk", "softcap", "has_sinks"),
    [
        ("own", 0, 0, 0.0, False),
        ("int8", 0, 0, 0.0, False),
        ("int8 static", 0, 0, 0.0, False),
        ("own", 20, 0, 0.0, True),
        ("own", 0, 24, 5.0, False),
        ("int8", 33, 0, 5.0, True),
    ],
)
@pytest.mark.parametrize("kind", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(33, 1), (0, 50), (15, 3), (16, 16)], [(40, 1), (59, 1), (17, 2), (66, 1)]],
)
@pytest.mark.parametrize(
    ("block", "num_heads", "dim", "rotary", "interleaved"),
    [(16, 6, 40, 24, False), (32, 16, 64, 48, True), (64, 4, 64, 40, False)],
)
def test_rotation_cache_and_attention(
    runtime,
    lengths,
    kind,
    block,
    num_heads,
    dim,
    rotary,
    interleaved,
    cache,
    window,
    chunk,
    softcap,
    has_sinks,
):
    """Rows of (tokens in the cache before, new tokens), in blocks scattered over the pool; slots
    that were never written hold NaN, or have scales that are NaN, and tables name such blocks in
    front of the first key that a row still sees."""
    rng = np.random.default_rng(5)
    table = rng.standard_normal((80, rotary)).astype(np.float32)
    pool = rng.permutation(24).astype(np.int32)
    keys = stored(np.full((24, KV_HEADS, dim, block), np.nan, np.float32), kind)
    values = stored(np.full((24, KV_HEADS, block, dim), np.nan, np.float32), kind)
    own, of_channels, scales = cache == "own", [None, None], [0] * 4
    if not own:
        keys, values = (np.full(x.shape, 99, np.int8) for x in (keys, values))
        kept = [np.full((24, KV_HEADS, block), np.nan, np.float16) for _ in range(2)]
        if cache == "int8 static":
            kept = of_channels = list(rng.uniform(0.02, 0.04, (2, KV_HEADS, dim)).astype("f4"))
        at = 2 if cache == "int8 static" else 0
        scales[at : at + 2] = [address(x) for x in kept]
    shape = _native.AttentionShape(
        [num_heads, KV_HEADS, dim, dim, block, interleaved, kind, not own, window, chunk],
        *(0.3, softcap),
    )
    sinks = 3 * rng.standard_normal(num_heads).astype(np.float32) if has_sinks else None
    tables = np.zeros((len(lengths), 6), np.int32)
    taken, wanted, history = 0, [], []
    for row, (before, new) in enumerate(lengths):
        count = -(-(before + new) // block)
        tables[row, :count] = pool[taken : taken + count]
        taken += count
        made = [
            rng.standard_normal((before + new, heads, dim)).astype(np.float32)
            for heads in (num_heads, KV_HEADS, KV_HEADS)
        ]
        history.append(made if kind == F32 else [from_bf16(to_bf16(x)) for x in made])

    def step(pieces):
        """Feed tokens [begin, end) of every row."""
        q, k, v = (
            stored(
                np.concatenate([h[i][b:e] for h, (b, e) in zip(history, pieces, strict=True)]), kind
            )
            for i in range(3)
        )
        positions = np.concatenate([np.arange(b, e) for b, e in pieces]).astype(np.int64)
        owners = np.repeat(np.arange(len(pieces)), [e - b for b, e in pieces])
        slots = (tables[owners, positions // block] * block + positions % block).astype(np.int64)
        cu = np.cumsum([0, *(e - b for b, e in pieces)]).astype(np.int32)
        lens = np.array([e for _, e in pieces], np.int32)
        y = np.empty((len(q), num_heads * dim), q.dtype)
        arrays = (q, k, v, table, positions, slots, cu, lens, tables, keys, values, y)
        sizes = (num_heads * dim, KV_HEADS * dim, KV_HEADS * dim, len(q), len(pieces), 6, rotary, 0)
        beside = [*scales, 0 if sinks is None else address(sinks)]
        runtime.attention(shape, [address(a) for a in arrays] + beside, sizes)
        return y if kind == F32 else from_bf16(y)

    def first_key(t):
        return t // chunk * chunk if chunk else max(0, t + 1 - window) if window else 0

    step([(0, max(1, before)) if before else (0, 0) for before, _ in lengths])
    for row, (before, _) in enumerate(lengths):
        tables[row, : first_key(before) // block] = pool[-1]
    got = step([(before, before + new) for before, new in lengths])
    for (before, new), (q, k, v) in zip(lengths, history, strict=True):
        at = np.arange(before + new)
        q, k = rotated(q, at, table, interleaved), rotated(k, at, table, interleaved)
        if not own:
            k, v = rounded(k, of_channels[0]), rounded(v, of_channels[1])
        for t in range(before, before + new):
            for h in range(num_heads):
                g = h // (num_heads // KV_HEADS)
                seen = slice(first_key(t), t + 1)
                logits = 0.3 * k[seen, g] @ q[t, h]
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                if has_sinks:
                    logits = np.append(logits, sinks[h])
                wanted.append(softmax(logits)[: t + 1 - seen.start] @ v[seen, g])
    off = np.abs(got.reshape(-1, dim) - np.array(wanted))
    # Scores of up to ten are rounded with the heads they come from; numbers between two of int8
    # either way.
    most = 0.15 if kind == BF16 else 2e-5 if own else 0.05
    assert off.max() < most and off.mean() < (0.01 if kind == BF16 else 1e-3)


def test_experts(runtime):
    rng = np.random.default_rng(9)
    num_experts, width, inner, top_k, num_tokens = 5, 40, 36, 2, 9
    ups = rng.standard_normal((num_experts, 2 * inner, width)).astype(np.float32) * 0.2
    downs = rng.standard_normal((num_experts, width, inner)).astype(np.float32) * 0.2
    made = []
    for weights, gated in ((ups, True), (downs, False)):
        made.append([])
        for weight in weights:
            matrix = _native.make_packed(0, *weight.shape, 0, gated)
            runtime.set_rows(matrix, weight.shape[0], address(weight), F32, weight.shape[1])
            made[-1].append(matrix)
    x = rng.standard_normal((num_tokens, width)).astype(np.float32)
    ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)], np.int64)
    weights = rng.random((num_tokens, top_k)).astype(np.float32)
    y = np.empty_like(x)
    experts = _native.Experts(*made)
    runtime.experts(
        experts,
        address(x),
        address(ids),
        address(weights),
        address(y),
        F32,
        num_tokens,
        width,
        top_k,
    )
    wanted = np.zeros_like(x)
    for t in range(num_tokens):
        for e, w in zip(ids[t], weights[t], strict=True):
            both = ups[e] @ x[t]
            gate = both[:inner]
            wanted[t] += w * (downs[e] @ (gate / (1 + np.exp(-gate)) * both[inner:]))
    assert np.abs(y - wanted).max() < 1e-5


def test_greedy_takes_the_smallest_of_equals_and_nan_before_all(runtime):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((4, 5003)).astype(np.float32)
    logits[1, [40, 4000]] = 9
    logits[2, [4100, 17]] = np.nan
    ids, peaks = np.empty(4, np.int64), np.empty(4, np.float32)
    runtime.greedy(address(logits), 4, 5003, address(ids), address(peaks))
    assert ids.tolist() == [int(logits[0].argmax()), 40, 17, int(logits[3].argmax())]
    assert np.isnan(peaks[2]) and peaks[1] == 9


def test_a_recorded_plan_reads_what_its_buffers_hold_now(runtime):
    weight = np.eye(64, dtype=np.float32) * 2
    matrix = _native.make_packed(0, 64, 64, 0, False)
    runtime.set_rows(matrix, 64, address(weight), F32, 64)
    x, y = np.ones((3, 64), np.float32), np.empty((3, 64), np.float32)
    plan = _native.Plan()
    runtime.begin(plan)
    for source, target in ((x, y), (y, y.copy())):
        runtime.linear(matrix, address(source), F32, 3, 64, 0, 0.0, 0, 0, address(target), F32, 64)
    runtime.end()
    assert len(plan) == 2
    x[:] = np.arange(64)
    runtime.replay([plan], 1)
    assert np.array_equal(y, 2 * x)
