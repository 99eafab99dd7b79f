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
    "channel_delta": StateSpec("channel_delta", 3, 3, 8, 6, (24, 24, 18), 4, "float32"),
    "space": StateSpec("space", 4, 2, 8, 6, (24, 16, 16), 4, "float32"),
    "space, one group": StateSpec("space", 3, 1, 16, 4, (12, 16, 16), 4, "float32"),
    "short_conv": StateSpec("short_conv", 0, 0, 0, 0, (10,), 3, "float32"),
}
LENGTHS = (1, 2, 7, 63, 64, 65, 150)
BLOCK, NUM_BLOCKS = 16, 40
KEPT, NOBODY = 4, -1


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
        self.num_gates = spec.key_dim if spec.kind == "channel_delta" else 1  # of each head
        self.weights = {
            "conv": values(1, channels, spec.conv_width) * 0.5,
            "conv_bias": values(2, channels) * 0.2,
            "decay": -np.exp(values(3, heads)) if has_state else None,
            "dt_bias": values(4, heads * self.num_gates) if has_state else None,
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
        heads, is_delta = spec.num_heads, spec.kind in ("delta", "channel_delta")
        dt = values(200 + seq, length, heads * self.num_gates) if heads else None
        beta = values(300 + seq, length, heads) if is_delta else None
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
        counts = [count for _, count in rows]
        self._step(rows, lengths, counts, counts, 1 if all(n == 1 for n in counts) else 0)

    def draft(
        self,
        rows: list[tuple[int, int]],
        lengths: dict[int, int],
        refused: list[int],
        captured: int = 0,
    ) -> None:
        """A step whose rows end in so many refused drafts each. captured: tokens per row of a
        captured step, padding after those of the row; a padding row is between the others."""
        counts = [count for _, count in rows]
        if not captured:
            self._step(rows, lengths, counts, counts, 0, refused)
            return
        rows, refused = [rows[0], (NOBODY, 0), *rows[1:]], [refused[0], 0, *refused[1:]]
        real = [count for _, count in rows]
        self._step(rows, lengths, [captured] * len(rows), real, captured, refused)

    def _step(
        self,
        rows: list[tuple[int, int]],
        lengths: dict[int, int],
        counts: list[int],
        real: list[int],
        tokens_per_row: int,
        refused: list[int] | None = None,
    ) -> None:
        """Feed the first `real` of `counts` tokens a row and padding after them."""
        refused = refused or [0] * len(rows)
        self.tables[NOBODY] = [self.tables[rows[0][0]][-1]]  # stale, as those of padding rows are
        starts = [self.done.get(seq, 0) for seq, _ in rows]
        ends = [
            0 if s == NOBODY else a + n for (s, _), a, n in zip(rows, starts, counts, strict=True)
        ]
        widest = max(*(len(self.tables[seq]) for seq, _ in rows), -(-max(ends) // BLOCK))
        tables = np.full((len(rows), widest), self.free[0], np.int32)
        for row, (seq, _) in enumerate(rows):
            tables[row, : len(self.tables[seq])] = self.tables[seq]
        offsets = np.cumsum([0, *counts])
        positions = np.concatenate([a + np.arange(n) for a, n in zip(starts, counts, strict=True)])
        is_real = np.concatenate([np.arange(n) < r for n, r in zip(counts, real, strict=True)])
        batch = AttentionBatch.upload(
            *(self.device.to_device, offsets, ends, tables, is_real - 1, positions),
            tokens_per_row=tokens_per_row,
        )
        batch.is_exact = NOBODY not in [seq for seq, _ in rows]
        parts = [
            self._fed(seq, lengths.get(seq, 0), start, count, right - wrong)
            for (seq, _), start, count, right, wrong in zip(
                rows, starts, counts, real, refused, strict=True
            )
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
        assert np.all(np.isfinite(host)), "padding and its rows are finite, too"
        for row, (seq, _) in enumerate(rows):
            if seq != NOBODY:
                right = real[row] - refused[row]
                self.done[seq] = starts[row] + right
                self.found.setdefault(seq, []).append(host[offsets[row] : offsets[row] + right])

    def _fed(self, seq: int, length: int, start: int, count: int, right: int) -> list[Any]:
        """A row's inputs; after the first `right` ones, those of tokens that will not be."""
        own = self.inputs(seq, max(length, start + right))
        wrong = self.inputs(seq + 50, count - right)
        return [
            None if a is None or b is None else np.concatenate((a[start : start + right], b))
            for a, b in zip(own, wrong, strict=True)
        ]

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

    @pytest.mark.parametrize("is_captured", [False, True])
    def test_refused_drafts_leave_no_trace(
        self, driver: Any, device: Any, kernels: Any, spec: StateSpec, is_captured: bool
    ) -> None:
        """Prompts, and steps of up to KEPT tokens of which any but the first turn out wrong; steps
        without drafts and drafts that are all right are among them."""
        if "kept" not in driver.features:
            pytest.skip("the driver does not declare kept")
        spec, dice = replace(spec, kept=KEPT), np.random.default_rng(5)
        world = World(self, driver, device, kernels, spec)
        if is_captured and not world.backend.can_capture_decode:
            pytest.skip("the driver's steps are not captured")
        lengths = {0: 16, 1: 32, 2: 48}  # after these, tables name blocks of others
        for seq, prompt in ((0, 1), (1, 19), (2, 32)):
            world.grow(seq, prompt)
            world.feed([(seq, prompt)], lengths)
        blocks = {table[-1] for table in world.tables.values()}
        others = [number for number in range(NUM_BLOCKS) if number not in blocks]
        while any(world.done[seq] < n for seq, n in lengths.items()):
            left = {seq: n - world.done[seq] for seq, n in lengths.items()}
            seqs = [seq for seq in dice.permutation(3).tolist() if left[seq]]
            counts = [min(left[seq], int(dice.integers(1, KEPT + 1))) for seq in seqs]
            refused = [int(dice.choice(np.array([0, n - 1, dice.integers(n)]))) for n in counts]
            for seq, count in zip(seqs, counts, strict=True):
                world.grow(seq, world.done[seq] + count)
            rows = list(zip(seqs, counts, strict=True))
            wide = int(dice.integers(max(counts), KEPT + 1)) if is_captured else 0
            world.draft(rows, lengths, refused, wide)
        for seq, length in lengths.items():
            expected = world.expected(seq, length)
            self._close(np.concatenate(world.found[seq]), expected, spec.dtype)
        for tensor in world.bits():
            assert np.isnan(tensor[others]).all(), "a block that is nobody's was written"

    def _close(self, got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
        assert got.shape == expected.shape and np.all(np.isfinite(got))
        relative, absolute = self.tolerance(dtype)
        limit = absolute + relative * float(np.max(np.abs(expected)))
        worst = float(np.max(np.abs(got - expected)))
        assert worst <= limit, f"off by {worst:.3g}, at most {limit:.3g} is allowed for {dtype}"


class TestState(StateConformance):
    """Run by `fastdeploy plugins check`."""
