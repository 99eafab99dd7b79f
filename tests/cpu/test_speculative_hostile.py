"""A drafter that fails or lies costs its drafts: requests do not notice, one warning is logged, the
failures are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastdeploy_core.contracts.device import StepBuckets
from fastdeploy_core.contracts.speculative import DraftBatch, HostDraftInput
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import CapabilityError, ConfigError, PluginLoadError, WeightError
from fastdeploy_core.loading.drafters import DrafterMaker
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.worker.worker import Worker, largest_steps
from tests.cpu.engine_mixes import Settings
from tests.cpu.speculative_mixes import (
    NUM_DRAFTS,
    SpeculativeBench,
    answers_alone,
    check,
    make_requests,
)
from tests.worker_steps import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)


@pytest.fixture(scope="module")
def world(folder: Path, tensor_library: str) -> tuple[list[Any], Any]:
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_requests(Random(8), 6, folder, plain.vocab_size)
    return requests, answers_alone(plain, requests)


@pytest.fixture(scope="module")
def host(folder: Path, tensor_library: str) -> SpeculativeBench:
    return SpeculativeBench(folder, tensor_library, "ngram_match")


@pytest.fixture(scope="module")
def device(folder: Path, tensor_library: str) -> SpeculativeBench:
    return SpeculativeBench(folder, tensor_library, "draft_model", {"model": str(folder)})


class Hostile:
    """Does as it is told at every third call, and drafts a constant otherwise."""

    name = "hostile"

    def __init__(self, runs_on: str, propose: Callable[[Any], Any], good: Callable[[Any], Any]):
        self.runs_on, self._propose, self._good, self._calls = runs_on, propose, good, 0

    def propose(self, batch: Any) -> Any:
        self._calls += 1
        return self._good(batch) if self._calls % 3 else self._propose(batch)

    def observe(self, *_: Any) -> None:
        raise RuntimeError("observe")

    def forget(self, seq_id: int) -> None:
        raise RuntimeError("forget")


def explode(batch: Any) -> Any:
    raise RuntimeError("boom")


def constant(batch: HostDraftInput) -> list[list[int]]:
    return [[7] * limit for limit in batch.max_drafts]


ON_HOST = {
    "raises": explode,
    "too few rows": lambda batch: [],
    "too many drafts": lambda batch: [[5] * (limit + 1) for limit in batch.max_drafts],
    "outside the vocabulary": lambda batch: [[7, 10**9][:n] for n in batch.max_drafts],
    "negative": lambda batch: [[-7] * n for n in batch.max_drafts],
    "no list": lambda batch: None,
    "no numbers": lambda batch: [["seven"] * n for n in batch.max_drafts],
    "no rows": lambda batch: [None for _ in batch.max_drafts],
}


@pytest.mark.parametrize("name", ON_HOST)
def test_hostile_host_drafter(
    host: SpeculativeBench, world: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_hostile(host, Hostile("host", ON_HOST[name], constant), world, caplog)


def tensors(bench: SpeculativeBench) -> tuple[Any, dict[str, Callable[[DraftBatch], Any]]]:
    xp = bench.worker.device.xp

    def full(batch: DraftBatch, value: int, rows: int = 0, more: int = 0, dtype: Any = None) -> Any:
        shape = (len(batch.seq_ids) + rows, batch.max_drafts + more)
        return xp.full(shape, value, dtype=dtype or xp.int64, device="cpu")

    return (lambda batch: full(batch, 7)), {
        "raises": explode,
        "no tensor": lambda batch: None,
        "a list": lambda batch: [[7]] * len(batch.seq_ids),
        "rows too many": lambda batch: full(batch, 7, rows=1),
        "drafts too many": lambda batch: full(batch, 7, more=1),
        "wrong type": lambda batch: full(batch, 7, dtype=xp.float32),
        "outside the vocabulary": lambda batch: full(batch, 10**9),
        "negative": lambda batch: full(batch, -7),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("raises", "no tensor", "a list", "rows too many", "drafts too many", "wrong type"),
        *("outside the vocabulary", "negative"),
    ],
)
def test_hostile_device_drafter(
    device: SpeculativeBench, world: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = tensors(device)
    run_hostile(device, Hostile("device", bad[name], good), world, caplog)


def run_hostile(
    bench: SpeculativeBench, drafter: Hostile, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    requests, truth = world
    speculation = bench.speculation
    speculation._drafter, speculation.guard.num_failures = drafter, 0
    caplog.set_level(logging.WARNING, "fastdeploy_core.speculative.guard")
    settings = Settings(max_num_seqs=4, prefix_caching=True, overlap=True)
    core, collector = bench.run_varied(settings, [(0, r) for r in requests], None)
    check(collector, requests, truth)
    stats = core.stats()
    assert stats.draft_tokens_total > 0, "its good drafts are used"
    assert stats.draft_failures_total > 2
    ours = [r for r in caplog.records if r.name == "fastdeploy_core.speculative.guard"]
    assert len(ours) == 1 and "hostile" in ours[0].getMessage()


class Loads:
    """Plugins as resolved, but with one driver in place of the chosen one of its kind."""

    def __init__(self, resolved: ResolvedPlugins, kind: str, driver: Any) -> None:
        self._resolved, self._kind, self._driver = resolved, kind, driver

    def load(self, kind: str, name: str = "") -> Any:
        return self._driver if kind == self._kind else self._resolved.load(kind, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)


def start_with(bench: SpeculativeBench, driver: Any, kind: str = "speculative") -> None:
    worker = Worker(bench.config, Loads(bench._resolved, kind, driver))  # type: ignore[arg-type]
    try:
        worker.load()
    finally:
        worker.close()


def test_drafters_that_cannot_be_built_stop_the_start(host: SpeculativeBench) -> None:
    class Nowhere:
        name, runs_on = "nowhere", "cloud"

    class Fails:
        name, runs_on = "fails", "host"

        def __init__(self, context: Any) -> None:
            raise KeyError("what")

    class Refuses:
        name, runs_on = "refuses", "device"

        def __init__(self, context: Any) -> None:
            assert context.builder is not None and context.model is not None
            context.load_model("/somewhere", "")

    class Lacks:
        name, runs_on = "lacks", "device"

        def __init__(self, context: Any) -> None:
            context.builder.norm("model.not_there", 32, 1e-6)
            context.load_weights(["model.not_there."])

    with pytest.raises(PluginLoadError, match="runs_on = 'cloud'; expected 'host' or 'device'"):
        start_with(host, Nowhere)
    with pytest.raises(PluginLoadError, match="cannot be built: KeyError: 'what'"):
        start_with(host, Fails)
    with pytest.raises(ConfigError, match="its requirements did not name"):
        start_with(host, Refuses)
    start_with(host, Lacks)  # random weights cannot be missing


def test_draft_without_weights_is_refused(device: SpeculativeBench, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", with_tokenizer=True)
    save_file({"model.norm.weight": np.zeros(32, dtype=np.float32)}, draft / "model.safetensors")
    assert device.config.speculative is not None
    speculative = replace(device.config.speculative, options={"model": str(draft)})
    model = replace(device.config.model, load_format="auto")
    config = replace(device.config, speculative=speculative, model=model)
    runner = device.worker._runner
    maker = DrafterMaker(
        config,
        speculative,
        device.worker.device,
        runner._drafting._kernels,
        runner._loaded,
        resolve_plugins(config),
    )
    with pytest.raises(WeightError, match=r"lacks .* weights that LlamaForCausalLM needs"):
        maker.make(0)


def test_devices_that_only_take_certain_sizes_draft_on_the_host(device: SpeculativeBench) -> None:
    class Buckets(CpuDevice):
        def __init__(self, options: Any) -> None:
            super().__init__(options)
            self.limits = replace(
                self.limits, step_buckets=StepBuckets((4,), (16, 128), (8,), (4,))
            )

    with pytest.raises(CapabilityError, match="possible: ngram_match or suffix"):
        start_with(device, Buckets, "device")


def test_memory_is_measured_with_as_many_drafts_as_there_can_be(
    host: SpeculativeBench, device: SpeculativeBench
) -> None:
    for bench in (host, device):
        cache = replace(bench.config.cache, num_blocks_override=None)
        config = replace(bench.config, cache=cache)
        steps, num_blocks = largest_steps(config)
        assert steps[2].rows is not None
        assert steps[2].rows.counts.tolist() == [1 + NUM_DRAFTS] * config.batch.max_num_seqs
        assert all(step.max_drafts == NUM_DRAFTS for step in steps)
        assert num_blocks >= config.batch.max_num_seqs * -(-(1 + 2 * NUM_DRAFTS) // 4)
        worker = Worker(config, bench._resolved)
        info = worker.load()
        assert info.available_bytes > 0
        speculation = worker._runner._drafting
        assert speculation.guard.num_failures == 0
        assert not getattr(speculation._drafter, "_histories", None), "nothing stays of it"
        worker.close()
