"""Captured steps of prompts: what a replay gives is what running the step operation by operation
gives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fastdeploy_core.config import GraphConfig, SpeculativeConfig
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.models.decoder import DecoderLM
from fastdeploy_core.worker import graph_sizes
from fastdeploy_testing.capturing import (
    CapturingDevice,
    RecordableAttention,
    RecordablePrompts,
    WithPrompts,
)
from tests.cpu.test_model_runner import Life
from tests.worker_steps import VOCAB, Steps, engine_config, make_worker, sharpen, write_model

SIZES = (8, 24, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def make_steps(folder: Path, library: str, graphs: GraphConfig) -> Steps:
    processors = ("LogitBiasLogitsProcessor",)  # which some of Life's requests ask for
    config = engine_config(folder, library, max_num_seqs=6, logits_processors=processors)
    worker = make_worker(dataclasses.replace(config, graphs=graphs))
    worker.resolved = WithPrompts(worker.resolved)  # type: ignore[assignment]
    worker.load()
    sharpen(worker)
    return Steps(worker, num_blocks=256, num_host_blocks=64)


@pytest.fixture
def pair(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Steps, Steps]]:
    """Without captured graphs, and with."""
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: SIZES)
    eager = make_steps(folder, tensor_library, GraphConfig(enabled=False))
    captured = make_steps(folder, tensor_library, GraphConfig())
    yield eager, captured
    for steps in (eager, captured):
        steps.worker.close()


def replays(steps: Steps) -> int:
    """Of captured prompts: they are the last ones made."""
    device = steps.worker.device
    assert isinstance(device, CapturingDevice)
    return sum(work.num_replays for work in device.recorded[-len(SIZES) :])


@pytest.mark.parametrize("seed", [1, 2])
def test_lives_are_the_same(pair: tuple[Steps, Steps], seed: int) -> None:
    """Chunks of prompts beside decodes, of every size up to the largest and beyond."""
    eager, captured = (Life(steps, np.random.default_rng(seed), 14).run() for steps in pair)
    assert captured == eager
    assert replays(pair[1]) > 10


def test_rows_and_tokens_of_an_earlier_step_leave_no_trace(pair: tuple[Steps, Steps]) -> None:
    rng = np.random.default_rng(0)
    lengths = [[7, 9, 6, 1], [3], [8], [20, 4], [60], [2, 2, 2, 2, 2, 2]]
    found = []
    for steps in pair:
        tokens = []
        for nth, group in enumerate(lengths):
            rng = np.random.default_rng(nth)
            ids = [100 * nth + i for i in range(len(group))]
            for seq_id, length in zip(ids, group, strict=True):
                steps.add(seq_id, rng.integers(3, VOCAB, length).tolist())
            steps.step([steps.row(seq_id) for seq_id in ids])
            steps.step([steps.row(seq_id) for seq_id in ids])
            tokens += [steps.finish(seq_id) for seq_id in ids]
        found.append(tokens)
    assert found[0] == found[1]
    assert replays(pair[1]) == len(lengths) - 1, "60 tokens are more than any captured step takes"


def test_sizes() -> None:
    assert graph_sizes.prompt_ladder(50) == (50,)
    ladder = graph_sizes.prompt_ladder(10**6)
    assert ladder[-1] == graph_sizes.MOST_TOKENS
    assert all(b - a <= a for a, b in itertools.pairwise(ladder))


def test_what_is_captured(folder: Path) -> None:
    config = engine_config(folder, "torch", max_num_seqs=6)
    tokens = config.batch.max_num_batched_tokens
    able: list[Any] = [RecordablePrompts]
    limits = CapturingDevice(DeviceOptions(tensor_library="torch")).limits
    drafts = dataclasses.replace(config, speculative=SpeculativeConfig("ngram", 2))
    for wanted in (config, drafts):
        found = graph_sizes.prompt_sizes(wanted, limits, able)
        assert found == graph_sizes.prompt_ladder(tokens)
    any_size = dataclasses.replace(limits, graph_any_size=True)
    assert graph_sizes.prompt_sizes(config, any_size, able) == (tokens,)
    for device in (limits, any_size):
        assert graph_sizes.prompt_sizes(config, device, [*able, RecordableAttention]) == ()


class Compiling(CapturingDevice):
    """Would compile what is met inside."""

    made: ClassVar[list[Compiling]] = []
    is_compiling = False

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        self.made.append(self)
        self.is_compiling = True
        yield
        self.is_compiling = False


class OnDevice(WithPrompts):
    kind: type[CapturingDevice] = CapturingDevice

    def load(self, kind: str, name: str = "") -> Any:
        return self.kind if kind == "device" else super().load(kind, name)


def test_kernels_of_every_kind_of_step_are_met_before_any_is_captured(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest steps and captured ones of unlike sizes; afterwards tokens are what they would
    be."""
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: SIZES)
    config = engine_config(folder, tensor_library, max_num_seqs=6)
    found, met, forward = {}, list[int](), DecoderLM.forward
    monkeypatch.setattr(Compiling, "made", devices := list[Compiling]())

    def noting(self: Any, ids: Any, positions: Any, context: Any) -> Any:
        if devices and devices[-1].is_compiling:
            met.append(int(ids.shape[0]))
            assert not devices[-1].recorded
        return forward(self, ids, positions, context)

    monkeypatch.setattr(DecoderLM, "forward", noting)
    for kind in (CapturingDevice, Compiling):
        worker = make_worker(config)
        worker.resolved = OnDevice(worker.resolved)  # type: ignore[assignment]
        worker.resolved.kind = kind  # type: ignore[attr-defined]
        worker.load()
        sharpen(worker)
        found[kind] = Life(Steps(worker, 256, 64), np.random.default_rng(3), 6).run()
        worker.close()
    assert found[Compiling] == found[CapturingDevice]
    tokens = config.batch.max_num_batched_tokens
    assert met[:2] == [tokens, 6], "the largest prefill, the widest sampling"
    assert met[2:] == [6, 4, 2, 1, 48, 24, 8]
