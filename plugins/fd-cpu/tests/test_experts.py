"""Experts against numpy's of what their packed matrices stand for: few tokens, and so many that
threads divide rows."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import F32, address
from fd_cpu import _native
from test_products import packed

WIDTH, HALF, NUM_EXPERTS = 96, 64, 5
# kind, group, and the relative error that rounding activations may cause.
FORMATS = [
    pytest.param(0, 0, 1e-5, id="f32"),
    pytest.param(1, 0, 1e-2, id="bf16"),
    pytest.param(5, 0, 1e-2, id="bf16-coded"),
    pytest.param(2, 0, 3e-2, id="int8"),
    pytest.param(3, 0, 3e-2, id="int4"),
    pytest.param(3, 32, 3e-2, id="int4-32"),
]


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 9, 130, 300, 513])
def test_experts_of_every_size(runtime, kind, group, limit, num_tokens):
    rng, top_k = np.random.default_rng(num_tokens), 2
    gate_up = rng.standard_normal((NUM_EXPERTS, 2 * HALF, WIDTH)).astype(np.float32) * 0.1
    down = rng.standard_normal((NUM_EXPERTS, WIDTH, HALF)).astype(np.float32) * 0.1
    ups = [packed(kind, group, w, gated=True) for w in gate_up]
    downs = [packed(kind, group, w) for w in down]
    experts = _native.Experts([m for m, _ in ups], [m for m, _ in downs])
    x = rng.standard_normal((num_tokens, WIDTH)).astype(np.float32)
    # One expert has nearly everything, one nothing, and some choices are no expert.
    ids = np.where(
        rng.random((num_tokens, top_k)) < 0.5,
        1,
        rng.integers(-1, NUM_EXPERTS - 1, (num_tokens, top_k)),
    )
    weights = rng.random((num_tokens, top_k)).astype(np.float32)
    y = np.full_like(x, 7)
    runtime.experts(
        *(experts, address(x), address(ids), address(weights), address(y), F32),
        *(num_tokens, WIDTH, top_k),
    )
    wanted = np.zeros_like(x)
    for e in range(NUM_EXPERTS):
        hidden = x @ ups[e][1].T
        found = (silu(hidden[:, :HALF]) * hidden[:, HALF:]) @ downs[e][1].T
        wanted += found * ((ids == e) * weights).sum(1, keepdims=True)
    assert np.abs(y - wanted).max() / np.abs(wanted).max() < limit


@pytest.mark.parametrize("num_rows", [128, 150, 400])
@pytest.mark.parametrize(("kind", "group", "limit"), FORMATS)
def test_many_rows_of_a_small_matrix(runtime, kind, group, limit, num_rows):
    """Threads divide rows then; the result may be added to itself."""
    rng = np.random.default_rng(num_rows)
    weight = rng.standard_normal((96, 96)).astype(np.float32) * 0.1
    matrix, meant = packed(kind, group, weight)
    x = rng.standard_normal((num_rows, 96)).astype(np.float32)
    y = rng.standard_normal((num_rows, 96)).astype(np.float32)
    wanted = x @ meant.T + y
    runtime.linear(
        *(matrix, address(x), F32, num_rows, 96, 0, 0.0, 0, address(y)),
        *(address(y), F32, 96),
    )
    assert np.abs(y - wanted).max() / np.abs(wanted).max() < limit
