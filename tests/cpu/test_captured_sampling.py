"""The reference's draws look at numbers on the host; where the host only queues work they stay
outside of captured graphs, and tokens are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.config import SpeculativeConfig
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.reference.ops import sampling as ops_sampling
from fastdeploy_core.types import SamplingParams
from fastdeploy_core.worker.sampling_step import can_capture_sampling
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.capturing import CapturingDevice, OnCapturingDevice
from tests.worker_steps import Steps, engine_config, make_worker, sharpen, write_model


class Queueing(CapturingDevice):
    """Says of itself that its calls only queue work."""

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = dataclasses.replace(self.limits, asynchronous=True)


class Apart(CapturingDevice):
    """Says of itself that its memory is its own, so that reading it ends a capture."""

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = dataclasses.replace(self.limits, shares_host_memory=False)


class OnQueueing(OnCapturingDevice):
    def load(self, kind: str, name: str = "") -> Any:
        return Queueing if kind == "device" else super().load(kind, name)


def loaded(folder: Path, library: str, on: type[OnCapturingDevice], **changes: Any) -> Worker:
    worker = make_worker(dataclasses.replace(engine_config(folder, library), **changes))
    worker.resolved = on(worker.resolved)  # type: ignore[assignment]
    worker.load()
    return worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def test_only_draws_that_ask_nothing_of_the_host_are_captured(tensor_library: str) -> None:
    options = DeviceOptions(tensor_library=tensor_library, num_threads=1)
    waiting: Any = {"sample": ops_sampling.sample, "filter_logits": ops_sampling.filter_logits}
    own: Any = {"sample": lambda: None, "filter_logits": lambda: None}
    for device in (Queueing(options), Apart(options)):
        assert not can_capture_sampling(device, waiting)
        assert not can_capture_sampling(device, {**own, "filter_logits": waiting["filter_logits"]})
        assert can_capture_sampling(device, own)
    assert can_capture_sampling(CapturingDevice(options), waiting)


def test_tokens_are_drawn_after_the_captured_graph(folder: Path, tensor_library: str) -> None:
    found, are_captured = [], []
    for on in (OnCapturingDevice, OnQueueing):
        worker = loaded(folder, tensor_library, on)
        sharpen(worker)
        steps = Steps(worker, 64, 0)
        sampling = SamplingParams(temperature=1.0, top_k=7, top_p=0.9, seed=5)
        steps.add(1, [5, 6, 7], sampling=sampling)
        for _ in range(8):
            steps.step([steps.row(1)])
        found.append(steps.finish(1))
        are_captured.append(worker._runner._graphs.sampling is not None)
        worker.close()
    assert are_captured == [True, False]
    assert found[0] == found[1] and len(set(found[0])) > 1


def test_steps_with_drafts_are_not_captured(folder: Path, tensor_library: str) -> None:
    drafts = SpeculativeConfig("ngram_match", 2)
    worker = loaded(folder, tensor_library, OnQueueing, speculative=drafts)
    assert worker._runner._graphs is None
    worker.close()
