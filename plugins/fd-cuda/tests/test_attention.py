"""Attention kernels against the conformance kit, interpreted on the CPU or compiled on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

from fastdeploy_testing.conformance.test_attention import AttentionConformance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Direct(AttentionConformance):
    """Builds the driver without asking whether it serves this device: the interpreter runs on
    any."""

    runs_on: ClassVar[str] = DEVICE

    @pytest.fixture(scope="class")
    @classmethod
    def fd_tensor(cls) -> str:
        return "torch"

    if DEVICE == "cpu":

        @pytest.fixture(params=["float32"])
        def dtype(self, request: pytest.FixtureRequest) -> str:
            """The others are interpreted by test_attention_steps.py, which takes less time."""
            return str(request.param)

        def test_every_declared_block_size(
            self, request: Any, device: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch
        ) -> None:
            """The smallest and the largest; the other tests have one between."""
            limits = dataclasses.replace(device.limits, block_sizes=(1, 128))
            monkeypatch.setattr(device, "limits", limits)
            super().test_every_declared_block_size(request, device, kernels)

    def _backend(self, request: Any, device: Any, kernels: Any, spec: Any, size: int) -> Any:
        from fd_cuda.attention.gqa import PagedAttention
        from fd_cuda.attention.latent.driver import LatentAttention

        driver = LatentAttention if spec.kind == "mla" else PagedAttention
        return driver(spec, size, device, kernels)

    def test_memory_returns_to_the_baseline_after_100_cycles(
        self, request: Any, device: Any, kernels: Any
    ) -> None:
        if DEVICE == "cpu":
            pytest.skip("120 steps take the interpreter a minute")
        super().test_memory_returns_to_the_baseline_after_100_cycles(request, device, kernels)


class TestAttentionKernels(_Direct):
    """The kit's batches: mixed, shared blocks, canaries, every block size."""
