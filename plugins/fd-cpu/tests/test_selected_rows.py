"""Rows that are needed after a model's last block: copies, and plans that go on with these rows
alone."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import F32, address
from fd_cpu import _native

WIDTH, TOKENS = 64, 9


def selected(runtime, x, index, y):
    sizes = (index.size, y.shape[1] * y.itemsize, x.strides[0])
    runtime.select_rows(address(x), address(index), address(y), *sizes)


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
@pytest.mark.parametrize("rows", [[4], [0, 3, 8], [0, 0], [*range(TOKENS)]], ids=str)
def test_rows_are_copied_from_any_distance(runtime, kind, rows):
    wide = np.random.default_rng(0).integers(0, 60000, (TOKENS, WIDTH + 5)).astype(kind)
    x, index = wide[:, 2:-3], np.array(rows)
    y = np.full((len(rows) + 1, WIDTH), 7, kind)
    selected(runtime, x, index, y[:-1])
    assert np.array_equal(y[:-1], x[rows]) and (y[-1] == 7).all()


class Narrowed:
    """x to a product for every token, then for those that an index names: product + x."""

    def __init__(self, runtime, most):
        self.runtime, rng = runtime, np.random.default_rng(1)
        self.weight = np.eye(WIDTH, dtype=np.float32)[::-1] * 2
        self.matrix = _native.make_packed(0, WIDTH, WIDTH, 0, False)
        runtime.set_rows(self.matrix, WIDTH, address(self.weight), F32, WIDTH)
        self.x = rng.integers(-9, 9, (TOKENS, WIDTH)).astype(np.float32)
        self.starts, self.index = np.zeros(3, np.int32), np.zeros(most, np.int64)
        self.every = np.empty((TOKENS, WIDTH), np.float32)
        self.some = [np.empty((most, WIDTH), np.float32) for _ in range(3)]
        self.head = np.empty((most, WIDTH), np.float32)
        self.plan, self.behind = _native.Plan(), _native.Plan()
        runtime.begin(self.plan)
        runtime.count_tokens(address(self.starts), 2)
        self.multiply(self.x, self.every)
        selected(runtime, self.every, self.index, self.some[0])
        selected(runtime, self.x, self.index, self.some[1])
        self.multiply(self.some[0], self.some[2], self.some[1])
        runtime.end()
        self.behind.follow(self.plan)
        runtime.begin(self.behind)
        self.multiply(self.some[2], self.head)
        runtime.end()

    def multiply(self, x, y, residual=None):
        residual = 0 if residual is None else address(residual)
        rows = (F32, len(x), WIDTH, 0, 0.0, 0, residual)
        self.runtime.linear(self.matrix, address(x), *rows, address(y), F32, WIDTH)

    def replay(self, num_tokens, rows):
        for memory in (self.every, *self.some, self.head):
            memory[:] = 777
        self.starts[1:] = 1, num_tokens
        self.index[:] = 0
        self.index[: len(rows)] = rows
        self.runtime.replay([self.plan, self.behind], 1)


@pytest.mark.parametrize("most", [4, 6])
def test_a_plan_goes_on_with_needed_rows_alone(runtime, most):
    plan = Narrowed(runtime, most)
    x, weight = plan.x, plan.weight
    for tokens, rows in ((9, [2, 5, 8]), (5, [4]), (9, [0, 1, 3, 8]), (1, [0]), (7, [0, 6])):
        plan.replay(tokens, rows)
        assert np.array_equal(plan.every[:tokens], x[:tokens] @ weight.T)
        assert (plan.every[tokens:] == 777).all()
        first = x[rows] @ weight.T
        second = first @ weight.T + x[rows]
        wanted = (first, x[rows], second, second @ weight.T)
        for got, expected in zip((*plan.some, plan.head), wanted, strict=True):
            assert np.array_equal(got[: len(rows)], expected)
            assert (got[len(rows) :] == 777).all(), "padding rows are left alone"
