"""Operations around decode steps whose state lies on the device: the conformance tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import decode_oracle as oracle
from .base import OnDevice

SLOTS = 6  # the last one is the padding slot
BLOCK = 4
TABLE = 5  # blocks of a slot
VOCAB = 50
# Some rows, in no order; padding rows among them; one row; none.
ROWS: tuple[list[int], ...] = ([2, 0, 5, 3], [4], [5, 5, 1], [])
ANYTHING = 77  # what outputs hold before a kernel fills them


def slots_of(rows: list[int]) -> np.ndarray:
    """As an index, also where there is none."""
    return np.array(rows, "int64")


class DecodeOps(OnDevice):
    """Inherited by OpsConformance."""

    def _send(self, device: Any, arrays: Any) -> list[Any]:
        """Copies on the device; what is no array goes as it is."""
        return [
            self.to_device(device, a.copy()) if isinstance(a, np.ndarray) else a for a in arrays
        ]

    def _same(self, device: Any, got: Any, expected: np.ndarray, what: str) -> None:
        found = np.array(device.to_host(got))
        assert np.array_equal(found, expected), f"{what}: {found.tolist()}, not {expected.tolist()}"

    def _tables(self, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(SLOTS * TABLE).reshape(SLOTS, TABLE).astype("int32")

    @pytest.mark.parametrize("rows", ROWS, ids=str)
    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("room", [8, 20])
    def test_prepare_decode(
        self, device: Any, kernels: Any, rows: list[int], width: int, room: int
    ) -> None:
        rng, slots = np.random.default_rng(width), slots_of(rows)
        state = [
            self._tables(rng),
            np.array([9, 3, 15, 4, 8, 7]),  # computed: where room is 8, slot 4 has none left
            rng.integers(1, VOCAB, SLOTS),
            rng.integers(1, VOCAB, (SLOTS, 3)),
            np.array([3, 0, 1, 2, 3, 1]),  # drafts
            np.array([20, 20, 20, 20, room, 20]),
        ]
        count = len(rows)
        filled = [np.full(count * width, ANYTHING) for _ in range(3)]
        filled.append(np.full(count, ANYTHING, "int32"))
        filled.append(np.full((count, TABLE), ANYTHING, "int32"))
        arrays: list[Any] = [slots, *state, BLOCK, np.array([41]), *filled]
        sent = self._send(device, arrays)
        kernels["prepare_decode"](*sent)
        if count:
            oracle.prepare_decode(*arrays)
            names = ("turn", "input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")
            for name, got, expected in zip(names, sent[8:], arrays[8:], strict=True):
                self._same(device, got, expected, name)
        else:
            self._same(device, sent[8], np.array([42]), "turn")

    @pytest.mark.parametrize("count", [0, 1, 5])
    def test_place_tokens(self, device: Any, kernels: Any, count: int) -> None:
        rng = np.random.default_rng(count)
        positions, room = np.array([0, 7, 12, 3, 19]), np.array([1, 20, 12, 2, 20])
        for turned in (positions, positions[::-1]):
            arrays = (
                turned[-count:][:count],
                room[-count:][:count],
                self._tables(rng)[:count],
                BLOCK,
            )
            got = kernels["place_tokens"](*self._send(device, arrays))
            expected = oracle.place_tokens(*arrays)
            for name, one, other in zip(
                ("positions", "slot_mapping", "seq_lens"), got, expected, strict=True
            ):
                self._same(device, one, other, name)

    @pytest.mark.parametrize("rows", ROWS, ids=str)
    @pytest.mark.parametrize("shape", [(3, 0), (3, 2), (1, 1)], ids=str)
    @pytest.mark.parametrize("limit", [0, 2, 9])
    def test_keep_drafts(
        self, device: Any, kernels: Any, rows: list[int], shape: tuple[int, int], limit: int
    ) -> None:
        (num_proposals, num_results), slots = shape, slots_of(rows)
        rng = np.random.default_rng(limit)
        choices = np.array(
            [[4, 0, VOCAB - 1], [3, -1, 5], [VOCAB, 1, 2], [7, 8, -2], [-1, -1, -1]], "int64"
        )
        proposals = choices[np.arange(len(rows)) % 5, :num_proposals]
        for turned in (proposals, proposals[::-1].copy()):
            arrays: list[Any] = [
                slots, turned, rng.integers(-3, VOCAB, (len(rows), num_results)),
                np.array([limit]), VOCAB, np.array([9, 3, 15, 4, 8, 7]),
                np.array([20, 20, 18, 5, 10, 20]), rng.integers(1, VOCAB, (SLOTS, 3)),
                np.array([3, 0, 1, 2, 3, 0]),
            ]  # fmt: skip
            sent = self._send(device, arrays)
            posted = self._post(device, rows, num_proposals)
            got = kernels["keep_drafts"](*sent, posted)
            expected = oracle.keep_drafts(*arrays)
            self._same(device, got, expected, "what was taken")
            self._same(device, sent[8], arrays[8], "num_drafts")
            kept = np.array(device.to_host(sent[7]))
            for slot in range(SLOTS - 1):
                count = arrays[8][slot] if slot in rows else 3  # others stay whole
                assert np.array_equal(kept[slot, :count], arrays[7][slot, :count]), f"slot {slot}"
            self._was_posted(device, posted, expected[:, num_results:])

    @pytest.mark.parametrize("rows", ROWS, ids=str)
    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("has_peaks", [False, True])
    def test_finish_decode(
        self, device: Any, kernels: Any, rows: list[int], width: int, has_peaks: bool
    ) -> None:
        slots = slots_of(rows)
        for seed in range(12):
            rng = np.random.default_rng(seed)
            drafts = rng.integers(1, VOCAB, (SLOTS, 3))
            drawn = rng.integers(1, VOCAB, (len(rows), width))
            for row, slot in enumerate(rows):  # most drafts are right
                right = rng.integers(0, width + 1) % width
                drawn[row, :right] = drafts[slot, :right]
            marked, peaks = drawn.copy(), np.full(drawn.shape, np.finfo("float32").max)
            marked[rng.random(marked.shape) < 0.15] = -3
            peaks[rng.random(peaks.shape) < 0.15] = (np.nan, np.inf, -np.inf)[seed % 3]
            arrays: list[Any] = [
                slots, drawn.reshape(-1), marked.reshape(-1),
                peaks.reshape(-1) if has_peaks else None, drafts,
                np.array([3, 1, 2, 3, 2, 0]), np.array([9, 3, 15, 4, 8, 0]),
                rng.integers(1, VOCAB, SLOTS), np.full((len(rows), width), ANYTHING),
            ]  # fmt: skip
            sent = self._send(device, arrays)
            posted = self._post(device, rows, width + 2)
            got = kernels["finish_decode"](*sent, posted)
            last, told = oracle.finish_decode(*arrays)
            self._same(device, got, last, "places in drawn")
            for name, one, other in zip(
                ("num_computed", "newest", "results"), sent[6:], arrays[6:], strict=True
            ):
                part = slice(SLOTS - 1) if name == "newest" else slice(None)
                self._same(device, one[part], other[part], name)
            self._was_posted(device, posted, told)

    def _post(self, device: Any, rows: list[int], width: int) -> Any:
        """A box of three pages with room for one more row and column; None for odd rows, so that
        both ways are taken."""
        if len(rows) % 2:
            return None
        box = np.full((3, len(rows) + 1, width + 1), ANYTHING, "int64")
        return tuple(self._send(device, (box, np.array([7]))))

    def _was_posted(self, device: Any, posted: Any, told: np.ndarray) -> None:
        if posted is None:
            return
        rows, width = told.shape
        expected = np.full((3, rows + 1, width + 1), ANYTHING, "int64")
        expected[7 % 3, :rows, :width] = 7 * 2**32 + told % 2**32
        self._same(device, posted[0], expected, "the box")

    @pytest.mark.parametrize("rows", [[2, 0, 5, 3], [4], []], ids=str)
    @pytest.mark.parametrize("width", [1, 3])
    def test_append_history(self, device: Any, kernels: Any, rows: list[int], width: int) -> None:
        for seed in range(3):
            rng, slots = np.random.default_rng(seed), slots_of(rows)
            results = rng.integers(-2, 8, (len(rows), width))
            history = rng.integers(0, VOCAB, (SLOTS, 24)).astype("int32")
            arrays = [slots, results, np.array([9, 3, 15, 23, 8, 5]), history]
            sent = self._send(device, arrays)
            kernels["append_history"](*sent)
            oracle.append_history(*arrays)
            self._same(device, sent[3][: SLOTS - 1], history[: SLOTS - 1], "history")

    @pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 3), (1, 30)], ids=str)
    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_match_ngrams(self, device: Any, kernels: Any, sizes: tuple[int, int], n: int) -> None:
        slots, known = np.array([1, 0, 2, 2, 3, 4]), np.array([24, 17, 9, 3, 1, 24])
        for seed in range(6):
            history = np.random.default_rng(seed).integers(0, 3, (SLOTS, 24)).astype("int32")
            history[1] = np.arange(24)  # nothing comes twice
            for count in (6, 1, 0):
                arrays = (history, slots[:count], known[:count], *sizes, n)
                got = kernels["match_ngrams"](*self._send(device, arrays))
                self._same(device, got, oracle.match_ngrams(*arrays), "what followed")

    @pytest.mark.parametrize("rows", [0, 1, 7])
    @pytest.mark.parametrize("is_limited", [False, True])
    def test_mark_broken(self, device: Any, kernels: Any, rows: int, is_limited: bool) -> None:
        largest = np.finfo("float32").max
        peaks = np.array([np.nan, np.inf, -np.inf, 0, 2, largest, 1], "float32")
        possible = np.array([1, -np.inf, np.nan, 0, np.inf, largest, -np.inf], "float32")
        for turned in (slice(rows), slice(7 - rows, 7)):
            drawn = np.arange(rows) + 3 + turned.stop
            arrays = (drawn, peaks[turned], possible[turned] if is_limited else None)
            expected = np.where(np.isfinite(possible[turned]), drawn, -3) if is_limited else drawn
            expected = np.where(np.isfinite(peaks[turned]), expected, -2)
            got = kernels["mark_broken"](*self._send(device, arrays))
            self._same(device, got, expected, "tokens")

    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_keep_results(self, device: Any, kernels: Any, size: int) -> None:
        rng, slots = np.random.default_rng(size), np.array([4, 2, 0, 4, 3])  # 4 is the padding slot
        computed, results = rng.integers(0, 99, 5), rng.integers(-3, 999, (5, 1))
        kept = rng.integers(0, 999, (5, size))
        on_device = [self.to_device(device, x.copy()) for x in (slots, results, computed, kept)]
        kernels["keep_results"](*on_device)
        for row in (1, 2, 4):
            kept[row, computed[slots[row]] % size] = results[row, 0]
        assert np.array_equal(device.to_host(on_device[-1]), kept)
