"""A paged cache for the checks of attention drivers: rows of sequences, canaries around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec

from .base import OnDevice

# Finite, and large enough to show in any result that reads it.
GARBAGE = 777.0


@dataclass(slots=True)
class Row:
    """One sequence as the oracle sees it: all its keys and values."""

    num_new: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    blocks: list[int] = field(default_factory=list)


class World:
    """A cache of NaN canaries in which only the rows' own blocks (and block 0) hold numbers."""

    def __init__(
        self,
        suite: OnDevice,
        device: Any,
        kernels: Any,
        spec: AttentionSpec,
        block_size: int,
        rows: list[tuple[int, int]],
        shared_blocks: int = 0,
        first_seed: int = 0,
    ) -> None:
        self.device, self.kernels, self.spec, self.block_size = device, kernels, spec, block_size
        self._suite = suite
        self.sinks: np.ndarray | None = None
        if spec.sinks:
            noise = np.random.default_rng(5).standard_normal(spec.num_heads)
            self.sinks = (2 * noise).astype("float32")
        self.rows = [self._row(first_seed + i, n, t) for i, (n, t) in enumerate(rows)]
        if shared_blocks:  # the first row's blocks are the prefix of all rows
            shared = shared_blocks * block_size
            for row in self.rows[1:]:
                row.k[:shared], row.v[:shared] = self.rows[0].k[:shared], self.rows[0].v[:shared]
        self.num_tokens = sum(row.num_new for row in self.rows)
        needed = sum(-(-len(row.k) // block_size) for row in self.rows)
        self.num_blocks = 2 * needed + 3
        # Block 0 belongs to no row, because unused table entries are 0; other blocks are taken at
        # random.
        free = list(np.random.default_rng(9).permutation(np.arange(1, self.num_blocks)))
        for row in self.rows:
            own = -(-len(row.k) // block_size) - shared_blocks
            row.blocks = [int(b) for b in self.rows[0].blocks[:shared_blocks]]
            count = own if row is not self.rows[0] else own + shared_blocks
            row.blocks += [int(free.pop()) for _ in range(count)]
        self._nobodys = int(free[0])
        self.cache: tuple[Any, ...] = ()
        self.before: list[np.ndarray] = []

    def _row(self, seed: int, num_new: int, total: int) -> Row:
        rng, spec = np.random.default_rng(100 + seed), self.spec
        q = rng.standard_normal((num_new, spec.num_heads, spec.head_dim)).astype("float32")
        k = rng.standard_normal((total, spec.num_kv_heads, spec.head_dim)).astype("float32")
        if spec.kind == "mla":
            return Row(num_new, q, k, k[..., : spec.kv_lora_rank])
        v = rng.standard_normal((total, spec.num_kv_heads, spec.v_head_dim)).astype("float32")
        return Row(num_new, q, k, v)

    def write(self, backend: Any) -> tuple[Any, Any, Any]:
        """Fill the cache, through the device's kernel or a driver that writes it itself; returns
        (q, k, v) of the step."""
        device, spec = self.device, self.spec
        shapes = backend.cache_shapes(self.num_blocks)
        assert all(shape[0] == self.num_blocks for shape in shapes), (
            f"cache_shapes({self.num_blocks}) gives {shapes}: dimension 0 is the block"
        )
        arrays = [np.full(shape, np.nan, "float32") for shape in shapes]
        owned = sorted({b for row in self.rows for b in row.blocks})
        for array in arrays:
            # Memory that may be loaded and masked is finite garbage; memory that must not be
            # touched is NaN.
            array[[0, *owned]] = GARBAGE
        self.cache = tuple(self.put(a) for a in arrays)
        if self.rows and backend.unit == "rope_kv":
            self._feed_everything(backend)
            self.before = [np.array(device.to_host(c.float())) for c in self.cache]
            return self.step_inputs()
        slots = [
            row.blocks[t // self.block_size] * self.block_size + t % self.block_size
            for row in self.rows
            for t in range(len(row.k))
        ]
        stacked = [np.concatenate([r.k for r in self.rows])] if self.rows else []
        if self.rows and spec.kind == "gqa":
            stacked.append(np.concatenate([r.v for r in self.rows]))
        if self.rows:
            self.kernels["kv_write"](
                tuple(self.put(a) for a in stacked),
                self.cache,
                device.to_device(np.array(slots, "int64")),
            )
        self.before = [np.array(device.to_host(c.float())) for c in self.cache]
        return self.step_inputs()

    def _feed_everything(self, backend: Any) -> None:
        """Feed all tokens of all rows as prompts: the driver writes in its own layout."""
        whole = [
            Row(
                len(row.k),
                np.zeros((len(row.k), *row.q.shape[1:]), "float32"),
                row.k,
                row.v,
                row.blocks,
            )
            for row in self.rows
        ]
        own, self.rows = self.rows, whole
        self.num_tokens = sum(row.num_new for row in whole)
        self.forward(backend, self.step_inputs())
        self.rows = own
        self.num_tokens = sum(row.num_new for row in own)

    def put(self, array: np.ndarray) -> Any:
        """On the device, in the spec's dtype."""
        return self._suite.to_device(self.device, array, self.spec.dtype)

    def step_inputs(self) -> tuple[Any, Any, Any]:
        """q, k and v of the tokens that are fed."""
        spec = self.spec
        empty = np.zeros((0, spec.num_heads, spec.head_dim), "float32")
        q = np.concatenate([r.q for r in self.rows]) if self.rows else empty
        k = [r.k[len(r.k) - r.num_new :] for r in self.rows] or [
            np.zeros((0, spec.num_kv_heads, spec.head_dim), "float32")
        ]
        v = [r.v[len(r.v) - r.num_new :] for r in self.rows] or [
            np.zeros((0, spec.num_kv_heads, spec.v_head_dim), "float32")
        ]
        return self.put(q), self.put(np.concatenate(k)), self.put(np.concatenate(v))

    def batch(self) -> AttentionBatch:
        """The step's rows, host arrays and their device twins. Entries in front of what a row needs
        name a block that nobody has written."""
        width = max((len(r.blocks) for r in self.rows), default=1)
        tables = np.zeros((len(self.rows), width), "int32")
        for index, row in enumerate(self.rows):
            tables[index, : len(row.blocks)] = row.blocks
            needed = self.spec.retention.first_needed(len(row.k) - row.num_new)
            tables[index, : needed // self.block_size] = self._nobodys
        starts = np.cumsum([0, *(r.num_new for r in self.rows)])
        lengths = [len(r.k) for r in self.rows]
        positions = [t for r in self.rows for t in range(len(r.k) - r.num_new, len(r.k))]
        slots = [
            r.blocks[t // self.block_size] * self.block_size + t % self.block_size
            for r in self.rows
            for t in range(len(r.k) - r.num_new, len(r.k))
        ]
        put = self.device.to_device
        return AttentionBatch.upload(put, starts, lengths, tables, slots, positions)

    def forward(self, backend: Any, inputs: tuple[Any, Any, Any]) -> Any:
        """The step's result."""
        more = {}
        if self.sinks is not None:
            more["sinks"] = self._suite.to_device(self.device, self.sinks, "float32")
        return backend.forward(*inputs, self.cache, backend.prepare(self.batch()), **more)

    def check_canaries(self) -> None:
        """Check that nothing else in the cache changed: neither canaries nor earlier entries."""
        for before, tensor in zip(self.before, self.cache, strict=True):
            after = np.array(self.device.to_host(tensor.float()))
            assert np.array_equal(before, after, equal_nan=True), (
                "attention wrote to blocks that are not its own"
            )
