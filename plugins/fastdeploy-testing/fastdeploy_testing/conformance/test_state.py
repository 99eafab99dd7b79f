"""A driver of layers that keep a state, against a recurrence in numpy that takes one token after
the other: sequences cut anywhere and mixed with others, states that are kept, blocks of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import (
    AttentionBatch,
    StateBackend,
    StateSpec,
    StateWeights,
    cache_dtypes,
)
from fastdeploy_core.contracts.model import STATE_FEATURES
from fastdeploy_testing import oracle

from .base import OnDevice, values

SPECS = {
    "delta": StateSpec("delta", 4, 2, 8, 6, (16, 16, 24), 4, "float32"),
    "delta, a key head each": StateSpec("delta", 2, 2, 16, 16, (32, 32, 32), 4, "float32"),
    "space": StateSpec("space", 4, 2, 8, 6, (24, 16, 16), 4, "float32"),
    "space, one group": StateSpec("space", 3, 1, 16, 4, (12, 16, 16), 4, "float32"),
    "short_conv": StateSpec("short_conv", 0, 0, 0, 0, (10,), 3, "float32"),
}
LENGTHS = (1, 2, 7, 63, 64, 65, 150)
BLOCK, NUM_BLOCKS = 16, 40


class World:
    """Sequences of one layer: what each has fed, and in which block its state is."""

    def __init__(
        self, suite: OnDevice, driver: Any, device: Any, kernels: Any, spec: StateSpec
    ) -> None:
        self.suite, self.device, self.spec = suite, device, spec
        self.backend: StateBackend = driver(spec, BLOCK, device, kernels)
        self.xp = device.xp
        channels, heads = sum(spec.conv_parts), spec.num_heads
        has_state = spec.kind != "short_conv"
        self.weights = {
            "conv": values(1, channels, spec.conv_width) * 0.5,
            "conv_bias": values(2, channels) * 0.2,
            "decay": -np.exp(values(3, heads)) if has_state else None,
            "dt_bias": values(4, heads) if has_state else None,
            "skip": values(5, heads) if spec.kind == "space" else None,
        }
        self.held = StateWeights(
            **{
                name: None
                if array is None
                else suite.to_device(device, array, spec.dtype if "conv" in name else "float32")
                for name, array in self.weights.items()
            }
        )
        shapes = self.backend.cache_shapes(NUM_BLOCKS)
        dtypes = cache_dtypes(spec, len(shapes))
        self.cache = tuple(
            suite.to_device(device, np.full(shape, np.nan, np.float32), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        self.are_alike = False  # all sequences have the same inputs
        self.tables: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self.found: dict[int, list[np.ndarray]] = {}
        self.free = list(np.random.default_rng(9).permutation(NUM_BLOCKS))

    def inputs(self, seq: int, length: int) -> list[np.ndarray | None]:
        """x, dt and beta of one sequence."""
        spec, seq = self.spec, seq * (not self.are_alike)
        x = values(100 + seq, length, sum(spec.conv_parts))
        dt = values(200 + seq, length, spec.num_heads) if spec.num_heads else None
        beta = values(300 + seq, length, spec.num_heads) if spec.kind == "delta" else None
        return [x, dt, beta]

    def expected(self, seq: int, length: int) -> np.ndarray:
        """By the oracle, of the values that the driver was given."""
        dtype = self.spec.dtype
        given: list[Any] = [self.rounded(array, dtype) for array in self.inputs(seq, length)]
        weights: dict[str, Any] = {
            name: self.rounded(array, dtype if "conv" in name else "float32")
            for name, array in self.weights.items()
        }
        return oracle.recurrence(self.spec, *given, **weights)

    def rounded(self, array: np.ndarray | None, dtype: str) -> np.ndarray | None:
        """See OnDevice.rounded."""
        return None if array is None else self.suite.rounded(self.device, array, dtype)

    def grow(self, seq: int, end: int, *, moves: bool = False) -> None:
        """Entries of the table up to that token: of the block in which the state is, or goes on."""
        table = self.tables.setdefault(seq, [])
        missing = -(-end // BLOCK) - len(table)
        if missing > 0:
            new = int(self.free.pop()) if moves or not table else table[-1]
            table += [new] * missing

    def feed(self, rows: list[tuple[int, int]], lengths: dict[int, int]) -> None:
        """A step: so many tokens of each sequence."""
        starts = [self.done.get(seq, 0) for seq, _ in rows]
        ends = [start + count for start, (_, count) in zip(starts, rows, strict=True)]
        tables = np.zeros((len(rows), max(len(self.tables[seq]) for seq, _ in rows)), np.int32)
        for row, (seq, _) in enumerate(rows):
            tables[row, : len(self.tables[seq])] = self.tables[seq]
        offsets = np.cumsum([0, *(count for _, count in rows)])
        positions = np.concatenate(
            [np.arange(s, e) for s, e in zip(starts, ends, strict=True)]
        ).astype(np.int64)
        batch = AttentionBatch.upload(
            *(self.device.to_device, offsets, ends, tables, np.zeros_like(positions), positions),
            tokens_per_row=1 if all(count == 1 for _, count in rows) else 0,
        )
        parts = [
            [None if a is None else a[s:e] for a in self.inputs(seq, lengths[seq])]
            for (seq, _), s, e in zip(rows, starts, ends, strict=True)
        ]
        given = [
            None
            if column[0] is None
            else self.suite.to_device(self.device, np.concatenate(column), self.spec.dtype)
            for column in zip(*parts, strict=True)
        ]
        metadata = self.backend.prepare(batch)
        x, dt, beta = given
        result = self.backend.forward(x, dt, beta, self.held, self.cache, metadata)
        self.suite.assert_dtype(self.device, result, self.spec.dtype)
        host = self.suite.to_host(self.device, result)
        for row, (seq, _) in enumerate(rows):
            self.done[seq] = ends[row]
            self.found.setdefault(seq, []).append(host[offsets[row] : offsets[row + 1]])

    def bits(self) -> list[np.ndarray]:
        """The cache's contents."""
        return [self.suite.to_host(self.device, tensor).copy() for tensor in self.cache]


class StateConformance(OnDevice):
    """prepare() and forward() over every kind that the driver declares."""

    kind = "state"

    @pytest.fixture(params=SPECS)
    def spec(self, request: pytest.FixtureRequest, driver: Any, dtype: str) -> StateSpec:
        """Of kinds that the driver serves."""
        found = SPECS[request.param]
        if found.kind not in driver.features:
            pytest.skip(f"the driver does not declare {found.kind}")
        return replace(found, dtype=dtype)

    def test_it_declares_kinds_that_there_are(self, driver: Any) -> None:
        assert driver.features and driver.features <= STATE_FEATURES

    def test_sequences_cut_anywhere_and_mixed_equal_the_recurrence(
        self, driver: Any, device: Any, kernels: Any, spec: StateSpec
    ) -> None:
        world, dice = World(self, driver, device, kernels, spec), np.random.default_rng(4)
        lengths = dict(enumerate(LENGTHS))
        while any(world.done.get(seq, 0) < n for seq, n in lengths.items()):
            rows = []
            for seq in dice.permutation(len(LENGTHS)).tolist():
                left = lengths[seq] - world.done.get(seq, 0)
                if left and dice.random() < 0.7:
                    count = min(left, int(dice.choice([1, 1, 2, 9, 40, 70])))
                    world.grow(seq, world.done.get(seq, 0) + count, moves=dice.random() < 0.2)
                    rows.append((seq, count))
            if rows:
                world.feed(rows, lengths)
        for seq, length in lengths.items():
            expected = world.expected(seq, length)
            self._close(np.concatenate(world.found[seq]), expected, spec.dtype)

    def test_a_state_that_was_left_stays_and_others_go_on_from_it(
        self, driver: Any, device: Any, kernels: Any, spec: StateSpec
    ) -> None:
        """Three sequences from one block, one after the other and together; blocks of nobody keep
        their NaN."""
        world, length, kept = World(self, driver, device, kernels, spec), 70, 48
        lengths = dict.fromkeys(range(4), length)
        world.are_alike = True
        world.grow(0, kept)
        world.feed([(0, kept)], lengths)
        for seq in (1, 2, 3):
            world.tables[seq], world.done[seq] = list(world.tables[0]), kept
            world.found[seq] = list(world.found[0])
        for seq in range(4):
            world.grow(seq, length, moves=True)
        (block,), before = set(world.tables[0][:3]), world.bits()
        world.feed([(1, 1)], lengths)
        world.feed([(0, length - kept), (2, length - kept), (1, length - kept - 1)], lengths)
        for _ in range(length - kept):
            world.feed([(3, 1)], lengths)
        used = {table[-1] for table in world.tables.values()}
        others = [number for number in range(NUM_BLOCKS) if number not in used]
        assert block in others
        for old, new in zip(before, world.bits(), strict=True):
            assert np.array_equal(old[others], new[others], equal_nan=True)
        expected = world.expected(0, length)
        for seq in range(4):
            self._close(np.concatenate(world.found[seq]), expected, spec.dtype)

    def _close(self, got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
        assert got.shape == expected.shape and np.all(np.isfinite(got))
        relative, absolute = self.tolerance(dtype)
        limit = absolute + relative * float(np.max(np.abs(expected)))
        worst = float(np.max(np.abs(got - expected)))
        assert worst <= limit, f"off by {worst:.3g}, at most {limit:.3g} is allowed for {dtype}"


class TestState(StateConformance):
    """Run by `fastdeploy plugins check`."""
