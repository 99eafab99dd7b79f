"""An expert communicator: what is sent comes back weighted and in order, with any routing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.moe import ExpertGroup, ExpertPlan
from fastdeploy_core.errors import FastDeployError
from fastdeploy_testing.rank import expected_experts, expert_outputs

from .base import OnDevice

NUM_EXPERTS, HIDDEN, MAX_TOKENS = 4, 16, 24
IDENTITY = tuple(range(NUM_EXPERTS))


class ExpertCommunicatorConformance(OnDevice):
    """One rank in this process, two ranks in processes of their own."""

    kind = "expert_communicator"

    @pytest.mark.parametrize("layout", ["contiguous", "masked"])
    @pytest.mark.parametrize("tokens", [0, 1, 7, MAX_TOKENS])
    @pytest.mark.parametrize("top_k", [1, 2])
    @pytest.mark.parametrize("crowd", ["random", "one expert", "empty experts", "nowhere"])
    def test_round_trip(
        self, driver: Any, device: Any, layout: str, tokens: int, top_k: int, crowd: str
    ) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        x, ids, weights = self._inputs(tokens, top_k, crowd)
        got = self._round_trip(communicator, device, IDENTITY, layout, x, ids, weights)
        assert got.shape == (tokens, HIDDEN)
        assert np.allclose(got, expected_experts(x, ids, weights), rtol=1e-4, atol=1e-5)
        communicator.close()

    def test_contiguous_layout_is_grouped_by_expert(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        x = np.arange(5, dtype="float32")[:, None] * np.ones((1, HIDDEN), "float32")
        ids = np.array([[3], [0], [-1], [3], [1]])
        sent = communicator.dispatch(
            *(device.to_device(a) for a in (x, ids, np.ones((5, 1), "float32"))),
            communicator.plan(self._plan("contiguous", 1)),
        )
        offsets = self.to_host(device, sent.offsets).tolist()
        assert offsets == [0, 1, 2, 2, 4]
        rows = self.to_host(device, sent.x)[: offsets[-1], 0].tolist()
        assert rows[:2] == [1, 4] and sorted(rows[2:]) == [0, 3]
        communicator.close()

    def test_two_batches_in_flight_do_not_mix(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        plan = communicator.plan(self._plan("contiguous", 2))
        batches = [self._inputs(5, 2, "random", seed) for seed in (1, 2)]
        sent = [
            communicator.dispatch(*(device.to_device(a.copy()) for a in batch), plan)
            for batch in batches
        ]
        outputs = [expert_outputs(device, s, "contiguous", IDENTITY) for s in sent]
        for batch, s, y in reversed(list(zip(batches, sent, outputs, strict=True))):
            got = self.to_host(device, communicator.combine(y, s.handle))
            assert np.allclose(got, expected_experts(*batch), rtol=1e-4, atol=1e-5)
        communicator.close()

    def test_same_input_gives_same_bits(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        if not communicator.capabilities.deterministic:
            pytest.skip("capabilities.deterministic is False")
        batch = self._inputs(MAX_TOKENS, 2, "random")
        first, second = (
            self._round_trip(communicator, device, IDENTITY, "contiguous", *batch) for _ in range(2)
        )
        assert np.array_equal(first, second)
        communicator.close()

    def test_new_expert_map_moves_the_work_not_the_result(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, (0, 1, 2, 3, 0, 2)))
        batch = self._inputs(MAX_TOKENS, 2, "random")
        expected = expected_experts(*batch)
        for version, mapping in ((1, (3, 2, 1, 0, 3, 3)), (2, (0, 0, 1, 1, 2, 3))):
            communicator.set_expert_map(version, list(mapping))
            got = self._round_trip(communicator, device, mapping, "contiguous", *batch)
            assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)
        communicator.set_expert_map(1, [0, 1, 2, 3, 0, 0])  # an older version changes nothing
        got = self._round_trip(communicator, device, (0, 0, 1, 1, 2, 3), "contiguous", *batch)
        assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)
        communicator.close()

    def test_too_many_tokens_are_refused(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        plan = communicator.plan(self._plan("contiguous", 1))
        arrays = (
            np.ones((MAX_TOKENS + 1, HIDDEN), "float32"),
            np.zeros((MAX_TOKENS + 1, 1), "int64"),
            np.ones((MAX_TOKENS + 1, 1), "float32"),
        )
        with pytest.raises(FastDeployError, match=str(MAX_TOKENS)):
            communicator.dispatch(*(device.to_device(a) for a in arrays), plan)
        communicator.close()

    def test_cost_is_a_time(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        assert 0 < communicator.cost_s(8) < 60
        communicator.close()

    @pytest.mark.capability("elastic")
    def test_inactive_ranks(self, driver: Any, device: Any) -> None:
        communicator = driver(ExpertGroup(device, None, IDENTITY))
        communicator.set_active_ranks([True])
        if not communicator.capabilities.elastic:
            with pytest.raises(FastDeployError):
                communicator.set_active_ranks([False])
            pytest.skip("capabilities.elastic is False")
        communicator.close()

    @pytest.mark.capability("max_ranks")
    def test_two_ranks_in_two_processes(self, driver: Any, device: Any, fd_entry: Any) -> None:
        if driver.capabilities.max_ranks < 2:
            pytest.skip(f"capabilities.max_ranks is {driver.capabilities.max_ranks}")
        if device.limits.max_tensor_parallel_size < 2:
            pytest.skip(f"device {device.name} has no group of two ranks")
        with tempfile.TemporaryDirectory(prefix="fastdeploy-check-") as folder:
            address = Path(folder) / "group"
            address.mkdir(mode=0o700)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            ranks = [
                subprocess.Popen(  # noqa: S603 - our own interpreter
                    [sys.executable, "-P", "-m", "fastdeploy_testing.rank", device.name,
                     device.xp.name, str(rank), "2", str(address), fd_entry.name],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
                )
                for rank in range(2)
            ]  # fmt: skip
            try:
                for rank in ranks:
                    output, errors = rank.communicate(timeout=300)
                    assert rank.returncode == 0, errors.strip()[-2000:]
                    assert json.loads(output.strip().splitlines()[-1]) == {fd_entry.name: True}
            finally:
                for rank in ranks:
                    if rank.poll() is None:
                        rank.kill()
                        rank.wait()

    def _plan(self, layout: Any, top_k: int, num_physical: int = NUM_EXPERTS) -> ExpertPlan:
        return ExpertPlan(MAX_TOKENS, HIDDEN, top_k, num_physical, layout, "float32")

    def _inputs(
        self, tokens: int, top_k: int, crowd: str, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((tokens, HIDDEN)).astype("float32")
        # As in top-k routing, a token chooses an expert at most once.
        ids = np.argsort(rng.random((tokens, NUM_EXPERTS)), -1)[:, :top_k]
        if crowd == "one expert":
            ids[:, 0], ids[:, 1:] = 2, -1
        elif crowd == "empty experts":
            ids = np.argsort(rng.random((tokens, 2)), -1)[:, :top_k] * (NUM_EXPERTS - 1)
        elif crowd == "nowhere":
            ids[:] = -1
        ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
        return x, ids, rng.random((tokens, top_k)).astype("float32")

    def _round_trip(
        self,
        communicator: Any,
        device: Any,
        mapping: tuple[int, ...],
        layout: str,
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        plan = communicator.plan(self._plan(layout, ids.shape[1], len(mapping)))
        sent = communicator.dispatch(*(device.to_device(a.copy()) for a in (x, ids, weights)), plan)
        y = expert_outputs(device, sent, layout, mapping)
        return self.to_host(device, communicator.combine(y, sent.handle))


class TestExpertCommunicator(ExpertCommunicatorConformance):
    """Run by `fastdeploy plugins check`."""
