"""Body and cache operations against numpy and transformers."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.reference.ops import body as body
from fastdeploy_core.reference.ops import cache as cache
from tests.torch_oracle import ask


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(xp, result, expected, limit=1e-5):
    np.testing.assert_allclose(xp.to_numpy(result), expected, rtol=limit, atol=limit)


def angles(positions, width, theta=10000.0):
    turns = np.outer(positions, theta ** -(np.arange(0, width, 2) / width))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_embedding_linear_and_activation(xp, tokens):
    ids = np.arange(tokens) * 3 % 7
    table, weight, bias = numbers(7, 12), numbers(6, 12, seed=1), numbers(6, seed=2)
    x = body.embedding(xp.tensor(ids.astype(np.int64)), xp.tensor(table))
    close(xp, x, table[ids])
    close(xp, body.linear(x, xp.tensor(weight), None), table[ids] @ weight.T)
    close(xp, body.linear(x, xp.tensor(weight), xp.tensor(bias)), table[ids] @ weight.T + bias)
    gate, up = np.split(table[ids], 2, 1)
    close(xp, body.silu_and_mul(x), gate / (1 + np.exp(-gate)) * up)
    close(xp, x, table[ids])


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_norms(xp, tokens):
    a, b, weight = numbers(tokens, 32) * 5, numbers(tokens, 32, seed=1), numbers(32, seed=2)

    def norm(x):
        return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight

    x, residual = xp.tensor(a), xp.tensor(b)
    close(xp, body.rms_norm(x, xp.tensor(weight), 1e-5), norm(a))
    normed, total = body.add_rms_norm(x, residual, xp.tensor(weight), 1e-5)
    close(xp, normed, norm(a + b))
    close(xp, total, a + b)
    close(xp, x, a)
    close(xp, residual, b)


def test_norm_of_heads(xp):
    a, weight = numbers(3, 4, 16), numbers(16, seed=1)
    expected = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * weight
    close(xp, body.rms_norm(xp.tensor(a), xp.tensor(weight), 1e-6), expected)
    strided = xp.tensor(numbers(3, 6, 16))[:, 1:5]
    whole = xp.to_numpy(strided.contiguous())
    expected = whole / np.sqrt((whole**2).mean(-1, keepdims=True) + 1e-6) * weight
    close(xp, body.rms_norm(strided, xp.tensor(weight), 1e-6), expected)


def rotated(x, cos, sin, interleaved):
    width = 2 * cos.shape[1]
    out = x.copy()
    for i in range(width // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        a, b, c, s = x[..., first], x[..., second], cos[:, None, i], sin[:, None, i]
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens, rotary", [(7, 16), (7, 8), (1, 16), (0, 16)])
def test_rotary_embedding(xp, interleaved, tokens, rotary):
    q, k = numbers(tokens, 4, 16), numbers(tokens, 2, 16, seed=1)
    positions = np.random.default_rng(0).integers(0, 50, tokens)
    cos, sin = angles(np.arange(50), rotary)
    got = body.rotary_embedding(
        xp.tensor(q),
        xp.tensor(k),
        xp.tensor(positions),
        xp.tensor(np.concatenate((cos, sin), 1)),
        interleaved,
    )
    for result, x in zip(got, (q, k), strict=True):
        close(xp, result.contiguous(), rotated(x, cos[positions], sin[positions], interleaved))


def test_rotary_embedding_equals_transformers(xp, tmp_path):
    q, k = numbers(9, 4, 16), numbers(9, 2, 16, seed=1)
    cos, sin = angles(np.arange(100, 109), 16)
    answer = ask("rotary", tmp_path, q=q, k=k, cos=cos, sin=sin)
    table = xp.tensor(np.concatenate((cos, sin), 1))
    for interleaved, name in ((False, "llama"), (True, "ernie")):
        got = body.rotary_embedding(xp.tensor(q), xp.tensor(k), xp.arange(9), table, interleaved)
        for part, result in zip("qk", got, strict=True):
            close(xp, result.contiguous(), answer[f"{name}_{part}"])


def test_narrow_floats_keep_their_dtype(xp):
    x = xp.tensor(numbers(3, 2, 8)).to(xp.bfloat16)
    cos, sin = angles(np.arange(3), 8)
    table = xp.tensor(np.concatenate((cos, sin), 1))
    q, _ = body.rotary_embedding(x, x, xp.arange(3), table, True)
    assert xp.dtype_name(q) == "bfloat16"
    exact = rotated(xp.to_numpy(x.to(xp.float32)), cos, sin, True)
    close(xp, q.to(xp.float32).contiguous(), exact, 1e-2)


# -- cache -----------------------------------------------------------------------------------------


def pools(xp):
    return tuple(xp.full([4, 3, 2, dim], -1.0, dtype=xp.float32) for dim in (8, 6))


def test_write_touches_the_given_slots_only(xp):
    pair = pools(xp)
    rows = tuple(numbers(4, 2, dim, seed=dim) for dim in (8, 6))
    slots = np.array([11, 0, -1, 7])
    cache.kv_write(tuple(xp.tensor(r) for r in rows), pair, xp.tensor(slots))
    for pool, row in zip(pair, rows, strict=True):
        expected = np.full((12, *row.shape[1:]), -1.0, np.float32)
        expected[[11, 0, 7]] = row[[0, 1, 3]]
        close(xp, pool, expected.reshape(pool.shape))


def test_write_takes_slices_of_a_larger_product(xp):
    (pool, _) = pools(xp)
    qkv = numbers(3, 5, 8)
    cache.kv_write((xp.tensor(qkv)[:, 2:4],), (pool,), xp.tensor(np.array([4, 5, 6])))
    close(xp, pool.view([12, 2, 8])[4:7], qkv[:, 2:4])


def test_write_of_nothing(xp):
    pair = pools(xp)
    none = (xp.zeros([0, 2, 8]), xp.zeros([0, 2, 6]))
    cache.kv_write(none, pair, xp.zeros([0], dtype=xp.int64))
    cache.kv_write((xp.zeros([2, 2, 8]), xp.zeros([2, 2, 6])), pair, xp.tensor(np.array([-1, -1])))
    assert all(float(pool.amax()) == -1.0 for pool in pair)


def test_blocks_are_all_read_before_any_is_written(xp):
    blocks = numbers(4, 3, 2, 8)
    pool = xp.tensor(blocks)
    cache.kv_copy_blocks((pool,), xp.tensor(np.array([0, 1])), xp.tensor(np.array([1, 3])))
    close(xp, pool, blocks[[0, 0, 2, 1]])


def test_blocks_go_out_and_come_back(xp):
    blocks = numbers(4, 3, 2, 8)
    pool = xp.tensor(blocks)
    (taken,) = cache.kv_read_blocks((pool,), xp.tensor(np.array([2, 0])))
    close(xp, taken, blocks[[2, 0]])
    pool.zero_()
    close(xp, taken, blocks[[2, 0]])
    cache.kv_write_blocks((pool,), xp.tensor(np.array([1, 3])), (taken,))
    close(xp, pool, np.stack((blocks[0] * 0, blocks[2], blocks[0] * 0, blocks[0])))
