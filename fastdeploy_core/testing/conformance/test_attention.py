"""Attention over a paged cache: mixed batches, scattered and shared blocks, canaries, graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import AttentionBatch, AttentionQuestion, AttentionSpec
from fastdeploy_core.testing import oracle

from .base import MEBIBYTE, OnDevice, used_bytes

# (tokens fed, tokens in all) per row; chunk edges and block edges for block sizes 16 and 64.
BATCHES = {
    "one token": [(1, 1)],
    "one prompt": [(17, 17)],
    "decodes": [(1, 5), (1, 64), (1, 65), (1, 130)],
    "prompts": [(3, 3), (64, 64), (65, 65)],
    "chunk after chunk": [(16, 80), (1, 17)],
    "mixed": [(1, 33), (20, 20), (1, 1), (7, 71), (1, 128)],
    "several tokens each": [(2, 40), (3, 66), (1, 9)],
}
SHAPES = {
    "mha": (4, 4, 16, 16),
    "gqa 4:2": (4, 2, 32, 32),
    "gqa 8:1": (8, 1, 16, 16),
    "gqa 6:2, narrow values": (6, 2, 32, 16),
    "head 64": (2, 1, 64, 64),
}


# Finite, and large enough to be seen in any result that it gets into.
GARBAGE = 777.0


@dataclass(slots=True)
class Row:
    """One sequence as the oracle sees it: all its keys and values."""

    num_new: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    blocks: list[int] = field(default_factory=list)


def gqa_spec(shape: str, dtype: str) -> AttentionSpec:
    """A spec of the grid."""
    heads, kv_heads, width, v_width = SHAPES[shape]
    return AttentionSpec("gqa", heads, kv_heads, width, v_width, width**-0.5, dtype)


def mla_spec(dtype: str) -> AttentionSpec:
    """Latent rows of 32 + 16."""
    return AttentionSpec("mla", 4, 1, 48, 32, 0.2, dtype, kv_lora_rank=32, qk_rope_head_dim=16)


class AttentionConformance(OnDevice):
    """Results, and that no byte outside a sequence's own blocks is read or written."""

    kind = "attention"

    def test_mixed_batches_equal_the_oracle_gqa(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        for batch in BATCHES.values():
            self._check(request, device, kernels, gqa_spec("gqa 4:2", dtype), batch, dtype)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_head_shapes_equal_the_oracle(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str, shape: str
    ) -> None:
        self._check(request, device, kernels, gqa_spec(shape, dtype), BATCHES["mixed"], dtype)

    def test_mla_equals_the_oracle(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        for batch in BATCHES.values():
            self._check(request, device, kernels, mla_spec(dtype), batch, dtype)

    def test_every_declared_block_size(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        dtype = device.limits.dtypes[0]
        for size in device.limits.block_sizes or (1, 16, 32, 64, 128):
            spec = gqa_spec("gqa 4:2", dtype)
            self._check(request, device, kernels, spec, BATCHES["mixed"], dtype, block_size=size)

    def test_batch_without_rows(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        dtype = device.limits.dtypes[0]
        self._check(request, device, kernels, gqa_spec("mha", dtype), [], dtype)

    @pytest.mark.capability("block_sharing")
    def test_sequences_that_share_blocks(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        if not device.limits.block_sharing:
            pytest.skip("limits.block_sharing is False")
        size = self._block_size(device)
        rows = [(1, 2 * size + 3), (5, 2 * size + 5), (1, 2 * size + 1)]
        spec = gqa_spec("gqa 4:2", dtype)
        self._check(request, device, kernels, spec, rows, dtype, shared_blocks=2)

    def test_result_of_a_row_does_not_depend_on_its_company(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        spec = gqa_spec("gqa 4:2", dtype)
        crowd = self._run(request, device, kernels, spec, BATCHES["mixed"])
        for index, row in enumerate(BATCHES["mixed"]):
            alone = self._run(request, device, kernels, spec, [row], first_seed=index)
            relative, absolute = self.tolerance(dtype)
            difference = np.max(np.abs(alone[0] - crowd[index]))
            assert difference <= absolute + relative * np.max(np.abs(alone[0]))

    @pytest.mark.capability("can_capture_decode")
    def test_captured_decode_equals_eager(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        spec = gqa_spec("gqa 4:2", device.limits.dtypes[0])
        backend = self._backend(request, device, kernels, spec, self._block_size(device))
        if not (device.limits.graph_capture and backend.can_capture_decode):
            pytest.skip("limits.graph_capture and can_capture_decode are not both True")
        world = World(self, device, kernels, spec, self._block_size(device), BATCHES["decodes"])
        inputs = world.write(backend)
        batch = world.batch()
        exact = backend.forward(*inputs, world.cache, backend.prepare(batch))
        eager = np.array(device.to_host(exact.float()))
        out = device.xp.zeros_like(exact)
        longest = np.full_like(batch.seq_lens, batch.seq_lens.max())
        bounds = replace(
            batch,
            seq_lens=longest,
            block_tables=np.zeros_like(batch.block_tables),
            tokens_per_row=1,
            is_exact=False,
        )

        def run() -> None:
            out.copy_(backend.forward(*inputs, world.cache, backend.prepare(bounds)))

        run()
        graph = device.capture(run)
        relative, absolute = self.tolerance(spec.dtype)

        def check(rows: slice) -> None:
            out.fill_(777.0)
            graph.replay()
            got = np.array(device.to_host(out.float()))
            assert np.isfinite(got).all(), "a row that stands in for a missing one is not finite"
            difference = np.max(np.abs(got - eager)[rows])
            assert difference <= absolute + relative * np.max(np.abs(eager))

        check(slice(None))
        # The next batch has one row less: its place is taken by a row of nobody.
        lengths, slots = batch.seq_lens.copy(), device.to_host(batch.slot_mapping).copy()
        lengths[-1], slots[-1] = 0, -1
        batch.seq_lens_dev.copy_(device.to_device(lengths))
        batch.slot_mapping.copy_(device.to_device(slots))
        check(slice(0, -1))
        world.check_canaries()

    def test_memory_returns_to_the_baseline_after_100_cycles(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        spec = gqa_spec("gqa 4:2", device.limits.dtypes[0])
        size = self._block_size(device)
        backend = self._backend(request, device, kernels, spec, size)
        world = World(self, device, kernels, spec, size, BATCHES["mixed"])
        inputs = world.write(backend)

        def cycle() -> None:
            device.to_host(
                backend.forward(*inputs, world.cache, backend.prepare(world.batch())).float()
            )

        for _ in range(20):
            cycle()
        before = used_bytes(device)
        for _ in range(100):
            cycle()
        grown = used_bytes(device) - before
        assert grown <= 24 * MEBIBYTE, f"{grown / MEBIBYTE:.1f} MiB more after 100 cycles"

    def _block_size(self, device: Any) -> int:
        return int(device.limits.default_block_size)

    def _backend(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, spec: Any, size: int
    ) -> Any:
        """The driver under test; for a device under test, the one the engine would choose."""
        from fastdeploy_core.plugins.discovery import discover
        from fastdeploy_core.plugins.drivers import lookup
        from fastdeploy_core.plugins.manager import hook_manager
        from fastdeploy_core.plugins.negotiate import ask_candidates

        option = request.config.getoption
        asked = self.driver_name or (
            option("--fd-driver") if option("--fd-kind") == "attention" else ""
        )
        question = AttentionQuestion(device.name, device.xp.name, spec, size, "auto")
        decision, _ = ask_candidates(
            hook_manager(), discover(), "attention", "fd_attention_backends", question, asked
        )
        if not decision.winner:
            if asked:
                pytest.skip(decision.why)
            pytest.fail(f"no attention driver for {spec} on {device.name}: {decision.candidates}")
        return lookup("attention", decision.winner)(spec, size, device, kernels)

    def _run(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        spec: AttentionSpec,
        rows: list[tuple[int, int]],
        block_size: int = 0,
        shared_blocks: int = 0,
        first_seed: int = 0,
    ) -> list[np.ndarray]:
        """Results per row, after checking the canaries."""
        size = block_size or self._block_size(device)
        backend = self._backend(request, device, kernels, spec, size)
        world = World(self, device, kernels, spec, size, rows, shared_blocks, first_seed)
        inputs = world.write(backend)
        got = backend.forward(*inputs, world.cache, backend.prepare(world.batch()))
        width = spec.num_heads * (spec.kv_lora_rank if spec.kind == "mla" else spec.v_head_dim)
        assert tuple(got.shape) == (world.num_tokens, width)
        world.check_canaries()
        result = self.to_host(device, got)
        assert np.all(np.isfinite(result)), "a block outside the sequence's table was read"
        return np.split(result, np.cumsum([n for n, _ in rows])[:-1]) if rows else []

    def _check(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        spec: AttentionSpec,
        rows: list[tuple[int, int]],
        dtype: str,
        *,
        block_size: int = 0,
        shared_blocks: int = 0,
    ) -> None:
        mixes = device.limits.mixed_batches
        if not device.limits.chunked_prefill:
            rows = [(new, total) for new, total in rows if new in (1, total)]
        groups = (
            [rows] if mixes else [[r for r in rows if r[0] == 1], [r for r in rows if r[0] > 1]]
        )
        for group in groups:
            results = self._run(request, device, kernels, spec, group, block_size, shared_blocks)
            size = block_size or self._block_size(device)
            world = World(self, device, kernels, spec, size, group, shared_blocks)
            relative, absolute = self.tolerance(dtype)
            for index, (got, row) in enumerate(zip(results, world.rows, strict=True)):
                q, k, v = (self.rounded(device, a, dtype) for a in (row.q, row.k, row.v))
                expected = oracle.attention(q, k, v, spec.scale)
                worst = float(np.max(np.abs(got - expected)))
                limit = absolute + relative * float(np.max(np.abs(expected)))
                assert worst <= limit, (
                    f"row {index} {group[index]} of {group}, {spec.kind} {dtype}: off by "
                    f"{worst:.3g}, at most {limit:.3g} is allowed"
                )


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
        self.rows = [self._row(first_seed + i, n, t) for i, (n, t) in enumerate(rows)]
        if shared_blocks:  # the first row's blocks are everybody's prefix
            shared = shared_blocks * block_size
            for row in self.rows[1:]:
                row.k[:shared], row.v[:shared] = self.rows[0].k[:shared], self.rows[0].v[:shared]
        self.num_tokens = sum(row.num_new for row in self.rows)
        needed = sum(-(-len(row.k) // block_size) for row in self.rows)
        self.num_blocks = 2 * needed + 3
        # Block 0 belongs to nobody, because unused table entries are 0; others are taken at random.
        free = list(np.random.default_rng(9).permutation(np.arange(1, self.num_blocks)))
        for row in self.rows:
            own = -(-len(row.k) // block_size) - shared_blocks
            row.blocks = [int(b) for b in self.rows[0].blocks[:shared_blocks]]
            count = own if row is not self.rows[0] else own + shared_blocks
            row.blocks += [int(free.pop()) for _ in range(count)]
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
        arrays = [np.full(shape, np.nan, "float32") for shape in shapes]
        owned = sorted({b for row in self.rows for b in row.blocks})
        for array in arrays:
            # What may be loaded and masked away is finite garbage; what may not be touched is NaN.
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
        """A step of all tokens of all rows, as prompts: the driver writes them in its own layout."""
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
        backend.forward(*self.step_inputs(), self.cache, backend.prepare(self.batch()))
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
        """The step's rows, host arrays and their device twins."""
        width = max((len(r.blocks) for r in self.rows), default=1)
        tables = np.zeros((len(self.rows), width), "int32")
        for index, row in enumerate(self.rows):
            tables[index, : len(row.blocks)] = row.blocks
        starts = np.cumsum([0, *(r.num_new for r in self.rows)]).astype("int32")
        lengths = np.array([len(r.k) for r in self.rows], "int32")
        positions = [t for r in self.rows for t in range(len(r.k) - r.num_new, len(r.k))]
        slots = [
            r.blocks[t // self.block_size] * self.block_size + t % self.block_size
            for r in self.rows
            for t in range(len(r.k) - r.num_new, len(r.k))
        ]
        put = self.device.to_device
        return AttentionBatch(
            num_seqs=len(self.rows),
            num_tokens=self.num_tokens,
            cu_seqlens_q=starts,
            seq_lens=lengths,
            block_tables=tables,
            cu_seqlens_q_dev=put(starts.copy()),
            seq_lens_dev=put(lengths.copy()),
            block_tables_dev=put(tables.copy()),
            slot_mapping=put(np.array(slots, "int64")),
            positions=put(np.array(positions, "int64")),
        )

    def check_canaries(self) -> None:
        """Nothing in the cache has changed: neither canaries nor what was written before."""
        for before, tensor in zip(self.before, self.cache, strict=True):
            after = np.array(self.device.to_host(tensor.float()))
            assert np.array_equal(before, after, equal_nan=True), (
                "attention wrote to blocks that are not its own"
            )


class TestAttention(AttentionConformance):
    """Run by `fastdeploy plugins check`."""
