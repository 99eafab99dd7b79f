"""Every operation of the table against the conformance kit's oracle: on the GPU where there is one, in
Triton's interpreter elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.testing.conformance.test_moe import MoEConformance
from fastdeploy_core.testing.conformance.test_ops import OpsConformance

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


class OnCuda:
    """The cuda table, on a device that can hold its tensors."""

    runs_on = DEVICE
    kind = "none"  # the device is `runs_on`, whatever is asked on the command line

    @pytest.fixture(scope="class")
    @classmethod
    def fd_tensor(cls) -> str:
        return "torch"

    @pytest.fixture(scope="class")
    @classmethod
    def kernels(cls, device: Any) -> Any:
        return build_kernel_table("cuda", {"tensor_library": "torch"})

    @pytest.fixture(params=["float32", "float16", "bfloat16"])
    def dtype(self, request: pytest.FixtureRequest) -> str:
        # The interpreter computes bfloat16 in a way of its own; float16 stands for both.
        if request.param == "bfloat16" and not HAS_GPU:
            pytest.skip("bfloat16 is tested on a GPU")
        return str(request.param)


class TestKernels(OnCuda, OpsConformance):
    """All operations."""

    if not HAS_GPU:

        def test_draws_follow_the_distribution(self, device: Any, kernels: Any) -> None:
            pytest.skip("20,000 programs take minutes to interpret; draws equal the reference's")

    def test_nothing_is_left_to_the_reference(self, kernels: Any) -> None:
        from fastdeploy_core.contracts.ops import OPERATIONS

        origins = kernels.origins()
        assert {o for o in OPERATIONS if origins[o] != "fd-cuda"} == set()


class TestMoE(OnCuda, MoEConformance):
    """The driver."""

    def _backend(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str, routing: Any
    ) -> Any:
        from fastdeploy_core.contracts.moe import MoESpec
        from fastdeploy_core.testing.conformance.test_moe import HIDDEN, INTERMEDIATE

        from fd_cuda.moe import CudaMoE

        return CudaMoE(MoESpec(routing, HIDDEN, INTERMEDIATE, dtype), device, kernels)
