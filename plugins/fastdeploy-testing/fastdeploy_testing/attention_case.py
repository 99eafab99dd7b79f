"""A few sequences fed to one attention driver step by step, compared with the expected results.

For drivers that rotate and write the cache themselves, with any cache layout: the cache starts as
NaN and only the driver fills it. oracle.py defines rotation and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec

from . import oracle

POSITIONS = 256


class AttentionCase:
    """Sequences with random keys, values and queries, in blocks scattered over the cache.
    `rotary_dim`: so many dimensions of a head turn, 0 for all."""

    def __init__(
        self,
        device: Any,
        spec: AttentionSpec,
        block_size: int,
        num_seqs: int,
        *,
        rotary_dim: int = 0,
    ) -> None:
        self.device, self.spec, self.block_size = device, spec, block_size
        rng = np.random.default_rng(5)
        width, self.num_blocks = spec.head_dim, 4 * num_seqs + 3
        order = rng.permutation(np.arange(1, 4 * num_seqs + 1)).astype("int32")
        self.tables = order.reshape(num_seqs, 4)
        self.lengths = [0] * num_seqs
        total = 4 * block_size

        def heads(count: int) -> np.ndarray:
            values = rng.standard_normal((num_seqs, total, count, width)).astype("float32")
            return self._rounded(values)

        self._q, self._k, self._v = (
            heads(spec.num_heads), heads(spec.num_kv_heads), heads(spec.num_kv_heads)
        )  # fmt: skip
        half = (rotary_dim or width) // 2
        angles = np.outer(np.arange(POSITIONS), 0.3 ** np.arange(half))
        self.rotary = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype("float32")

    def caches(self, driver: Any) -> tuple[Any, ...]:
        """The driver's cache tensors; reading what was never written gives NaN."""
        return tuple(
            self._put(np.full(shape, np.nan, "float32"))
            for shape in driver.cache_shapes(self.num_blocks)
        )

    def step(
        self, driver: Any, cache: tuple[Any, ...], rows: Sequence[tuple[int, int]]
    ) -> list[np.ndarray]:
        """Feed (sequence, number of tokens) rows; results per row, [tokens, heads * head_dim]."""
        spec, parts = self.spec, [[], [], []]  # type: tuple[AttentionSpec, list[list[np.ndarray]]]
        positions, slots = list[int](), list[int]()
        for seq, count in rows:
            start = self.lengths[seq]
            self.lengths[seq] += count
            for part, source in zip(parts, (self._q, self._k, self._v), strict=True):
                part.append(source[seq, start : start + count])
            for at in range(start, start + count):
                block = int(self.tables[seq, at // self.block_size])
                positions.append(at)
                slots.append(block * self.block_size + at % self.block_size)
        put, xp = self.device.to_device, self.device.xp
        starts = np.cumsum([0, *(count for _, count in rows)])
        lengths = [self.lengths[seq] for seq, _ in rows]
        tables = self.tables[[seq for seq, _ in rows]]
        batch = AttentionBatch.upload(put, starts, lengths, tables, slots, positions)
        q, k, v = (self._put(np.concatenate(part)) for part in parts)
        with xp.no_grad():
            out = driver.forward(q, k, v, cache, driver.prepare(batch), put(self.rotary.copy()))
        values = np.array(self.device.to_host(out.float()))
        assert values.shape == (len(positions), spec.num_heads * spec.head_dim)
        return np.split(values, starts[1:-1])

    def expected(self, seq: int, count: int) -> np.ndarray:
        """The last `count` rows of a sequence, from the oracle."""
        end, interleaved = self.lengths[seq], self.spec.rotary_interleaved
        where = np.arange(end)
        q, k = (oracle.rotary(x[seq, :end], where, self.rotary, interleaved)
                for x in (self._q, self._k))  # fmt: skip
        return oracle.attention(q[end - count :], k, self._v[seq, :end], self.spec.scale)

    def check(
        self, driver: Any, steps: Sequence[Sequence[tuple[int, int]]], tolerance: float
    ) -> None:
        """All steps, compared row by row."""
        cache = self.caches(driver)
        for rows in steps:
            for (seq, count), got in zip(rows, self.step(driver, cache, rows), strict=True):
                worst = float(np.max(np.abs(got - self.expected(seq, count))))
                assert worst <= tolerance, f"sequence {seq}, {count} tokens: off by {worst:.3g}"

    def _put(self, array: np.ndarray) -> Any:
        return self.device.to_device(array).to(self.device.xp.dtype(self.spec.dtype))

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        """The values rounded to the model's dtype."""
        return np.array(self.device.to_host(self._put(array.copy()).float()), "float64")
