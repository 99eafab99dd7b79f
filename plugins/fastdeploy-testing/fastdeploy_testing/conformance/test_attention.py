"""Attention over a paged cache: mixed batches, scattered and shared blocks, canaries, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import AttentionQuestion, AttentionSpec, HeadNorms
from fastdeploy_testing import oracle

from .attention_world import World
from .base import OnDevice, assert_memory_returns

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

BEYOND_PLAIN: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "window of a block": {"window": 16},
    "window of one token": {"window": 1},
    "chunk": {"chunk": 24},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 0.7},
    "window with sinks": {"window": 37, "sinks": True},
}


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

    @pytest.mark.parametrize("name", BEYOND_PLAIN)
    @pytest.mark.capability("features")
    def test_what_it_declares_equals_the_oracle(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str, name: str
    ) -> None:
        """Entries of tables in front of a window or chunk name a block of NaN."""
        plain = gqa_spec("gqa 4:2", dtype)
        spec = replace(plain, **BEYOND_PLAIN[name])
        backend = self._backend(request, device, kernels, plain, self._block_size(device))
        missing = spec.needs - getattr(backend, "features", frozenset())
        if missing:
            pytest.skip(f"features does not name {', '.join(sorted(missing))}")
        for rows in (BATCHES["mixed"], BATCHES["chunk after chunk"]):
            self._check(request, device, kernels, spec, rows, dtype)

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

    @pytest.mark.capability("norms_heads")
    def test_norms_of_heads_equal_the_kernels(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        """See NormingBackend."""
        spec, size = replace(gqa_spec("gqa 4:2", dtype), head_norms=True), self._block_size(device)
        backend = self._backend(request, device, kernels, spec, size)
        if backend.unit != "rope_kv" or not getattr(backend, "norms_heads", False):
            pytest.skip("norms_heads is not True")
        world = World(self, device, kernels, spec, size, BATCHES["mixed"])
        q, k, v = world.write(backend)
        of_q, of_k = np.random.default_rng(3).uniform(0.5, 2, (2, spec.head_dim)).astype("float32")
        norms = HeadNorms(world.put(of_q), world.put(of_k), 0.3)
        metadata = backend.prepare(world.batch())
        got = backend.forward(q, k, v, world.cache, metadata, norms=norms)
        normed = kernels["qk_norm"](q.clone(), k.clone(), norms.q, norms.k, norms.eps)
        expected = backend.forward(*normed, v, world.cache, metadata)
        got, expected = (self.to_host(device, x) for x in (got, expected))
        relative, absolute = self.tolerance(dtype)
        assert np.max(np.abs(got - expected)) <= absolute + relative * np.max(np.abs(expected))

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
        # The next batch has one row less: its place is taken by a padding row.
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

        assert_memory_returns(device, cycle)

    def _block_size(self, device: Any) -> int:
        return int(device.limits.default_block_size)

    def _backend(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, spec: Any, size: int
    ) -> Any:
        """The driver under test; for a device under test, the driver that the engine would
        choose."""
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
        with self.unchanged(device, **dict(zip("qkv", inputs, strict=True))):
            got = world.forward(backend, inputs)
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
                expected = oracle.attention(
                    *(q, k, v, spec.scale),
                    window=spec.window,
                    chunk=spec.chunk,
                    softcap=spec.softcap,
                    sinks=world.sinks,
                )
                worst = float(np.max(np.abs(got - expected)))
                limit = absolute + relative * float(np.max(np.abs(expected)))
                assert worst <= limit, (
                    f"row {index} {group[index]} of {group}, {spec.kind} {dtype}: off by "
                    f"{worst:.3g}, at most {limit:.3g} is allowed"
                )


class TestAttention(AttentionConformance):
    """Run by `fastdeploy plugins check`."""
