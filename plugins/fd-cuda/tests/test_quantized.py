"""Packed weights: every format's cells against the definition, on the GPU or in Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import HAS_GPU, OnCuda

from fastdeploy_testing.conformance import test_quantized_ops
from fastdeploy_testing.conformance.test_attention import gqa_spec
from fastdeploy_testing.conformance.test_kv_formats import KVFormatConformance, QuantizedWorld
from fastdeploy_testing.conformance.test_quantized_ops import QuantizedOpsConformance

# Of the conformance kit's batches or shapes and cache formats: every way through the kernels.
IN_INTERPRETER = {
    ("mixed", "int8"),
    ("mixed", "int4_zp"),
    ("gqa 6:2, narrow values", "float8_e4m3fn"),
}


class TestQuantized(OnCuda, QuantizedOpsConformance):
    """All formats of the core."""

    if not HAS_GPU:

        @pytest.fixture(params=["float32"])
        def dtype(self, request: pytest.FixtureRequest) -> str:
            return str(request.param)

        @pytest.fixture(autouse=True)
        def few_shapes(self, monkeypatch: pytest.MonkeyPatch) -> None:
            """Interpreting takes its time: one row, and uneven tiles."""
            monkeypatch.setattr(test_quantized_ops, "TOKENS", (0, 1, 7))

    def test_nothing_is_left_to_the_reference(self, kernels: Any) -> None:
        from fastdeploy_core.contracts.ops import FORMAT_OPERATIONS

        origins = kernels.origins()
        assert {o for o in FORMAT_OPERATIONS if origins[o] != "fd-cuda"} == set()


class TestQuantizedOnAnyCard(TestQuantized):
    """All formats of the core, as cards read them that the native kernels are not written for."""

    @pytest.fixture(autouse=True)
    def other_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fd_cuda.kernels import quant_weights

        monkeypatch.setattr(quant_weights, "native_reads", lambda: False)


class TestCacheFormats(OnCuda, KVFormatConformance):
    """Attention over quantized caches."""

    def _driver(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        from fd_cuda.attention.quantized import QuantizedAttention

        if spec.kind == "mla":
            pytest.skip("latent rows are left to the reference")
        given = request.node.callspec.params
        case = (given.get("batch", given.get("shape")), given["name"])
        if not HAS_GPU and case not in IN_INTERPRETER:
            pytest.skip("runs on a GPU; interpreting takes its time")
        return QuantizedAttention(spec, size, device, kernels)

    @pytest.mark.parametrize(("name", "is_static"), [("int8", False), ("int4_zp", True)])
    def test_steps_that_only_the_device_knows(
        self, device: Any, kernels: Any, name: str, is_static: bool
    ) -> None:
        """Steps with prompts as they are captured: the host knows how much there may be."""
        from fd_cuda.attention.quantized import QuantizedAttention

        spec = gqa_spec("gqa 4:2", device.limits.dtypes[0])
        spec = replace(spec, kv_format=name, kv_static=is_static)
        rows = [(1, 33), (20, 36), (2, 5), (0, 5), (0, 0)]
        driver = QuantizedAttention(spec, 16, device, kernels)
        world = QuantizedWorld(self, device, kernels, spec, 16, rows)
        inputs, batch = world.write(driver), world.batch()
        exact = driver.forward(*inputs, world.cache, driver.prepare(batch), None, world.scales)
        tokens, padding = batch.num_tokens, 5
        inputs = tuple(torch.cat((x, torch.full_like(x[:padding], torch.nan))) for x in inputs)
        batch.num_tokens += padding
        batch.cu_seqlens_q = np.array([0] + [batch.num_tokens] * len(rows), np.int32)
        batch.seq_lens = np.full(len(rows), 1000, np.int32)
        batch.block_tables, batch.is_exact = np.zeros_like(batch.block_tables), False
        got = driver.forward(*inputs, world.cache, driver.prepare(batch), None, world.scales)
        assert not got[tokens:].any()
        assert torch.allclose(got[:tokens].float(), exact.float(), rtol=1e-2, atol=1e-2)
