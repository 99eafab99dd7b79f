"""Operations between logits and tokens: the conformance tests of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_testing import oracle

from .base import OnDevice, values


class SamplingOps(OnDevice):
    """Inherited by OpsConformance."""

    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_apply_penalties(self, device: Any, kernels: Any, rows: int) -> None:
        for seed in (0, 1):
            rng = np.random.default_rng(seed)
            counts = rng.integers(0, 3, (rows, 50)).astype("int32")
            seen = rng.random((rows, 50)) < 0.3
            counts[:1, -1], seen[:, -1] = 0, True
            floats = [
                values(seed, rows, 50) * 3,
                values(2, rows),
                values(3, rows),
                (rng.random(rows) + 0.5).astype("float32"),
            ]
            sent = [self.to_device(device, array.copy()) for array in (*floats, counts, seen)]
            got = kernels["apply_penalties"](*sent)
            exact: list[Any] = [*(array.astype("float64") for array in floats), counts, seen]
            expected = oracle.apply_penalties(*exact)
            self.assert_close(device, got, expected, "float32")

    @pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
    def test_apply_bitmask(self, device: Any, kernels: Any, width: int) -> None:
        for seed in (width, width + 1):
            possible = np.random.default_rng(seed).random((3, width)) < 0.5
            logits = values(seed, 3, width)
            got = kernels["apply_bitmask"](
                self.to_device(device, logits.copy()),
                self.to_device(device, oracle.bitmask(possible)),
            )
            expected = np.where(possible, logits.astype("float64"), -np.inf)
            assert np.array_equal(self.to_host(device, got), expected)

    @pytest.mark.parametrize("width", [1, 40, 700])
    def test_filter_logits_keeps_the_right_set(self, device: Any, kernels: Any, width: int) -> None:
        settings = [
            (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (width, 1.0, 0.0), (10**6, 1.0, 0.0),
            (0, 0.5, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.3), (0, 1.0, 1.0), (7, 0.8, 0.01),
            (3, 0.99, 0.2), (3, 1.0, 0.0),
        ]  # fmt: skip
        for seed in (width, width + 1):
            self._filtered(device, kernels, values(seed, len(settings), width) * 3, settings)

    def test_filter_logits_takes_its_limits_in_float32(self, device: Any, kernels: Any) -> None:
        """Limits that bfloat16 would round to the other side."""
        rows = np.log(np.array([[0.8006, 0.1994], [0.769, 0.231]], "float32"))
        self._filtered(device, kernels, rows, [(0, 0.8005, 0.0), (0, 1.0, 0.3003)])

    def _filtered(
        self,
        device: Any,
        kernels: Any,
        logits: np.ndarray,
        settings: list[tuple[int, float, float]],
    ) -> None:
        top_k = np.array([s[0] for s in settings], "int64")
        top_p, min_p = (np.array([s[i] for s in settings], "float32") for i in (1, 2))
        got = kernels["filter_logits"](
            self.to_device(device, logits.copy()),
            *(self.to_device(device, a) for a in (top_k, top_p, min_p)),
        )
        expected = oracle.filter_logits(
            logits.astype("float64"), top_k, top_p.astype("float64"), min_p.astype("float64")
        )
        kept = np.isfinite(self.to_host(device, got))
        assert np.array_equal(kept, np.isfinite(expected))
        assert np.array_equal(self.to_host(device, got)[kept], expected[kept])

    def test_greedy_takes_the_smallest_of_equals(self, device: Any, kernels: Any) -> None:
        logits = values(0, 6, 50)
        logits[0, [30, 7]] = 9.0
        logits[1] = 0.0
        logits[2, [4, 40]] = 9.0, 9.001  # equal in bfloat16
        logits[3, 49] = 9.0
        for given in (logits, logits[::-1].copy(), logits[:0]):
            got = self.to_host(device, kernels["greedy"](self.to_device(device, given)))
            assert np.array_equal(got, np.argmax(given, -1)), "the smallest id of the largest"

    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_log_softmax(self, device: Any, kernels: Any, rows: int) -> None:
        for seed in (0, 1):
            logits = values(seed, rows, 200) * 10
            got = kernels["log_softmax"](self.to_device(device, logits.copy()))
            self.assert_close(device, got, oracle.log_softmax(logits.astype("float64")), "float32")

    def test_draw_depends_on_seed_position_and_logits_only(self, device: Any, kernels: Any) -> None:
        logits = values(0, 8, 300)
        seeds = np.arange(8, dtype="int64") * 2**40 - 5
        positions = np.array([0, 1, 2, 3, 4, 5, 2**31, 2**33], "int64")
        crowd = self._sample(device, kernels, logits, seeds, positions)
        assert np.array_equal(crowd, self._sample(device, kernels, logits, seeds, positions))
        alone = [
            self._sample(device, kernels, logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
            for i in range(8)
        ]
        assert np.array_equal(crowd, np.concatenate(alone)), "a row's token depends on the others"
        order = np.array([3, 1, 7, 0, 5, 2, 6, 4])
        mixed = self._sample(device, kernels, logits[order], seeds[order], positions[order])
        assert np.array_equal(crowd[order], mixed), "a row's token depends on its place"
        same = np.repeat(logits[:1], 64, 0)
        by_seed = self._sample(device, kernels, same, np.arange(64), np.zeros(64, "int64"))
        by_place = self._sample(device, kernels, same, np.zeros(64, "int64"), np.arange(64))
        assert len(set(by_seed)) > 8 and len(set(by_place)) > 8, "sampled tokens hardly vary"

    def test_draws_follow_the_distribution(self, device: Any, kernels: Any) -> None:
        # Fixed seeds, so the outcome is a constant of the kernel. 40.7 is the 99.99 % point of
        # chi-square with 12 degrees of freedom.
        probability = oracle.softmax(values(3, 13) * 1.5)
        count = 20000
        # 1,000 more for each changes nothing, but to bfloat16 they would all be alike.
        logits = np.repeat(np.log(probability)[None].astype("float32") + 1000, count, 0)
        seeds = np.random.default_rng(5).integers(-(2**62), 2**62, count)
        sampled = self._sample(device, kernels, logits, seeds, np.arange(count) % 97)
        seen = np.bincount(sampled, minlength=13)
        chi_square = float(((seen - count * probability) ** 2 / (count * probability)).sum())
        assert chi_square < 40.7, f"chi-square {chi_square:.1f} for {seen.tolist()}"

    def test_draw_never_takes_what_was_filtered_out(self, device: Any, kernels: Any) -> None:
        logits = np.full((64, 90), -np.inf, "float32")
        logits[:, 17] = -50.0
        logits[::2, 80] = 3.0
        sampled = self._sample(device, kernels, logits, np.arange(64), np.arange(64))
        assert set(sampled[1::2]) == {17} and set(sampled[::2]) <= {17, 80}

    @pytest.mark.parametrize("filters", [False, True])
    def test_rows_are_drawn_as_each_asks(self, device: Any, kernels: Any, filters: bool) -> None:
        """Compared with what the separate operations compute for every row."""
        for seed in range(4):
            rng, logits = np.random.default_rng(seed), values(seed, 7, 40) * 3
            logits[5, 7] = logits[5, 30] = logits[5].max() + 1  # the smallest of equals
            logits[1, -1] = 20.0  # a greedy row takes the last id
            # The last row takes part in every limit.
            is_random = np.array([1, 0, 1, 1, 1, 0, 1])
            top_k, seeds = np.array([0, 3, 5, 0, 40, 0, 7]), rng.integers(-(2**62), 2**62, 7)
            heat = np.array([0.5, 1.0, 1.7, 1.0, 0.9, 1.0, 3.0], "float32")
            top_p = np.array([0.8, 1.0, 1.0, 0.5, 1.0, 1.0, 0.7], "float32")
            min_p = np.array([0.0, 0.0, 0.3, 0.0, 0.5, 0.0, 0.1], "float32")
            places = np.array([0, 5, 99, 2**31, 7, 3, 11])
            rows = (is_random, top_k, seeds, heat, top_p, min_p, places)
            self._drawn(device, kernels, logits, rows, filters)

    @pytest.mark.parametrize("limit", ["top_k", "top_p", "min_p", "temperature"])
    def test_each_limit_alone_decides(self, device: Any, kernels: Any, limit: str) -> None:
        """Many rows of similar tokens, so that a small change of a limit changes some of them."""
        count = 8192 if limit == "temperature" else 1024
        logits = (values(1, count, 40) / 10 + np.linspace(0, 3, 40)).astype("float32")
        ones, zeros = np.ones(count, "float32"), np.zeros(count, "float32")
        rising = np.linspace(0.05, 0.95, count).astype("float32")
        rows = (
            np.ones(count, "int64"),
            np.arange(count) % 40 if limit == "top_k" else np.zeros(count, "int64"),
            np.arange(count),
            rising if limit == "temperature" else ones,
            rising if limit == "top_p" else ones,
            (1 + rising) / 2 if limit == "min_p" else zeros,
            np.arange(count),
        )
        self._drawn(device, kernels, logits, rows, True)

    def _drawn(
        self, device: Any, kernels: Any, logits: np.ndarray, rows: Any, filters: bool
    ) -> None:
        is_random, top_k, seeds, heat, top_p, min_p, places = rows
        send = self.to_device
        ids, peaks = kernels["draw"](
            send(device, logits.copy()), *(send(device, x.copy()) for x in rows), filters
        )
        scaled = send(device, logits / heat[:, None])
        if filters:
            limits = [send(device, x.copy()) for x in (top_k, top_p, min_p)]
            scaled = kernels["filter_logits"](scaled, *limits)
        sampled = self.to_host(
            device, kernels["sample"](scaled, send(device, seeds), send(device, places + 1))
        )
        wanted = np.where(is_random, sampled, logits.argmax(-1))
        assert np.array_equal(self.to_host(device, ids), wanted)
        assert np.array_equal(self.to_host(device, peaks), logits.max(-1))

    def _sample(
        self, device: Any, kernels: Any, logits: np.ndarray, seeds: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        arrays = (logits.copy(), seeds.astype("int64"), places.astype("int64"))
        return self.to_host(device, kernels["sample"](*(self.to_device(device, a) for a in arrays)))
