"""Integers in int32 words, against loops over plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fd_quant_hub import packing
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core import tensor

FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def xp(fd_tensor: str) -> Any:
    return tensor.load(fd_tensor or tensor.available()[0])


def host(x):
    return np.array(tensor.namespace(x).to_numpy(x))


def numbers(seed, *shape, high=16):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint8)


@FEW
@given(bits=st.sampled_from([2, 4, 8]), rows=st.integers(1, 5), words=st.integers(1, 6))
def test_int32_words_come_back(xp, bits, rows, words):
    values = numbers(bits + rows, rows, words * 32 // bits, high=1 << bits)
    packed = np.zeros((rows, words), np.uint32)
    for n in range(values.shape[1]):
        packed[:, n * bits // 32] |= values[:, n].astype(np.uint32) << (n * bits % 32)
    got = packing.unpack_int32(xp.from_numpy(packed.view(np.int32).copy()), bits)
    assert np.array_equal(host(got), values)


def test_awq_order_is_the_published_one(xp):
    word = sum(n << (4 * place) for place, n in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    packed = xp.from_numpy(np.array([[word]], np.uint32).view(np.int32).copy())
    got = packing.unpack_int32(packed, 4, packing.AWQ_ORDER)
    assert host(got).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
