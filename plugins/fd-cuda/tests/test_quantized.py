"""Packed weights: every format's cells against the definition, on the GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from fastdeploy_core.testing.conformance.test_kv_formats import KVFormatConformance
from fastdeploy_core.testing.conformance.test_quantized_ops import QuantizedOpsConformance
from test_kernels import HAS_GPU, OnCuda


class TestQuantized(OnCuda, QuantizedOpsConformance):
    """All formats of the core."""

    if not HAS_GPU:

        @pytest.fixture(params=["float32", "float16"])
        def dtype(self, request: pytest.FixtureRequest) -> str:
            return str(request.param)

    def test_nothing_is_left_to_the_reference(self, kernels: Any) -> None:
        from fastdeploy_core.contracts.quant_formats import FORMAT_OPERATIONS

        origins = kernels.origins()
        assert {o for o in FORMAT_OPERATIONS if origins[o] != "fd-cuda"} == set()


class TestCacheFormats(OnCuda, KVFormatConformance):
    """Attention over quantized caches."""

    def _driver(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        from fd_cuda.attention.quantized import QuantizedAttention

        if spec.kind == "mla":
            pytest.skip("latent rows are left to the reference")
        return QuantizedAttention(spec, size, device, kernels)
