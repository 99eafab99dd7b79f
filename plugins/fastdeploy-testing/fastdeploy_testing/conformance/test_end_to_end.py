"""A tiny random model on the device under test: greedy tokens equal the reference device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_testing.generate import greedy_tokens
from fastdeploy_testing.tiny_model import VOCAB

from .base import OnDevice

REFERENCE = "cpu"
MAX_TOKENS = 12


def prompts() -> list[list[int]]:
    """One token, lengths around a block, and two with a common prefix."""
    rng = np.random.default_rng(7)
    found = [rng.integers(3, VOCAB, n).tolist() for n in (1, 5, 63, 64, 65, 130)]
    return [*found, [*found[-1][:128], 9, 4]]


class EndToEndConformance(OnDevice):
    """The whole engine in a child process per run."""

    kind = "device"

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, tiny_model: Path) -> list[list[int]]:
        """The reference device's tokens, in float32."""
        result = greedy_tokens(
            tiny_model, prompts(), max_tokens=MAX_TOKENS, device=REFERENCE, dtype="float32"
        )
        return result["together"]

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tiny_model: Path, device: Any) -> dict[str, list[list[int]]]:
        """The tokens of the device under test."""
        return greedy_tokens(
            tiny_model,
            prompts(),
            max_tokens=MAX_TOKENS,
            device=device.name,
            tensor_library=device.xp.name,
            block_size=device.limits.default_block_size,
            dtype="float32" if "float32" in device.limits.dtypes else device.limits.dtypes[0],
        )

    def test_tokens_equal_the_reference_devices(
        self, device: Any, expected: list[list[int]], found: dict[str, list[list[int]]]
    ) -> None:
        if "float32" not in device.limits.dtypes:
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        assert found["together"] == expected

    def test_tokens_alone_equal_tokens_in_a_batch(
        self, device: Any, found: dict[str, list[list[int]]]
    ) -> None:
        if "float32" not in device.limits.dtypes:
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        assert found["alone"] == found["together"]

    def test_answers_differ_between_prompts(self, found: dict[str, list[list[int]]]) -> None:
        assert all(len(tokens) == MAX_TOKENS for tokens in found["together"])
        assert len({tuple(t) for t in found["together"]}) >= len(prompts()) - 1

    @pytest.mark.capability("max_tensor_parallel_size")
    def test_two_ranks_give_the_same_tokens(
        self, device: Any, tiny_model: Path, expected: list[list[int]]
    ) -> None:
        if device.limits.max_tensor_parallel_size < 2 or "float32" not in device.limits.dtypes:
            pytest.skip("limits.max_tensor_parallel_size is 1, or float32 is not declared")
        result = greedy_tokens(
            tiny_model,
            prompts()[:4],
            max_tokens=MAX_TOKENS,
            device=device.name,
            tensor_library=device.xp.name,
            block_size=device.limits.default_block_size,
            dtype="float32",
            tensor_parallel_size=2,
        )
        assert result["together"] == expected[:4]


class TestEndToEnd(EndToEndConformance):
    """Run by `fastdeploy plugins check`."""
