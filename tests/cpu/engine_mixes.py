"""Random request mixes on a real worker, with one loaded model for many differently set engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import BatchConfig, CacheConfig, EngineConfig, GraphConfig
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes.worker_process import make_worker
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import Request, SchedulerOutput
from fastdeploy_testing.capturing import OnCapturingDevice
from tests.checkpoints import VOCAB
from tests.null_engine import Collector, make_request

BLOCK_SIZE = 4
MAX_MODEL_LEN = 56
MAX_NUM_SEQS = 8
MAX_BATCHED_TOKENS = 80
MAX_STEPS = 3000


def make_engine_config(
    checkpoint: Path, tensor_library: str, num_ranks: int = 1
) -> tuple[EngineConfig, ResolvedPlugins]:
    """The reference device in float32 with small blocks."""
    config = build_engine_config(
        {
            "model": str(checkpoint),
            "device": "cpu",
            "tensor_library": tensor_library,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "num_gpu_blocks_override": 64,
            "tensor_parallel_size": num_ranks,
        }
    )
    # Threads cost more than they give on matrices this small.
    config = replace(config, device=replace(config.device, num_threads=1))
    shapes = read_shapes(config.model.hf_config, num_ranks)
    resolved = resolve(
        config, layers=shapes.layers, moe=[shapes.moe] if shapes.moe is not None else []
    )
    return config, resolved


class LateResult:
    """A step's result that is waited for only when it is wanted, as with overlap on a device."""

    def __init__(self, pending: Any, error: Exception | None = None) -> None:
        self._pending = pending
        self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._pending.wait()

    def exception(self) -> Exception | None:
        try:
            self.result()
        except Exception as error:
            return error
        return None


class SharedExecutor:
    """One loaded worker behind many engines, one after the other."""

    world_size, experts = 1, None

    def __init__(self, config: EngineConfig, resolved: ResolvedPlugins) -> None:
        self._worker = make_worker(config, resolved, 0, 1, "")
        self._info = self._worker.load()
        self._last: Any = None
        # Steps, and those that fed drafts before the results of the step before were read.
        self.num_steps = self.num_ahead = self.num_several = 0

    @property
    def sampling(self) -> Any:
        return self._worker.sampling

    def load(self) -> list[Any]:
        return [self._info]

    def initialize_cache(
        self,
        num_blocks: int,
        num_host_blocks: int,
        *more_blocks: int,
        host_files: Sequence[str] = (),
    ) -> None:
        sizes = (num_blocks, num_host_blocks, *more_blocks)
        self._worker.initialize_cache(*sizes, host_files=host_files)

    def submit(self, step: SchedulerOutput) -> LateResult:
        before, self._last = self._last, None
        try:
            self._last = self._worker.launch(step)
        except Exception as error:
            return LateResult(None, error)
        self.num_steps += 1
        if before is not None and before._launched.results is None:
            has_drafts = step.rows is not None and bool(step.rows.num_drafts.any())
            self.num_ahead += has_drafts
            self.num_several += has_drafts and step.num_decodes > 1
        return LateResult(self._last)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Settings:
    """What must not change a token."""

    prefix_caching: bool = False
    output_caching: bool = True
    chunked_prefill: bool = False
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    max_num_partial_prefills: int = 1
    max_num_seqs: int = 1
    num_blocks: int = 64
    host_blocks: int = 0
    overlap: bool = False

    def apply(self, config: EngineConfig, block_bytes: int) -> EngineConfig:
        """The configuration with these settings."""
        cache: CacheConfig = replace(
            config.cache,
            enable_prefix_caching=self.prefix_caching,
            enable_output_caching=self.output_caching,
            num_blocks_override=self.num_blocks,
            swap_space_bytes=self.host_blocks * block_bytes,
        )
        batch: BatchConfig = replace(
            config.batch,
            enable_chunked_prefill=self.chunked_prefill,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_num_seqs=self.max_num_seqs,
            overlap=self.overlap,
        )
        return replace(config, cache=cache, batch=batch)

    @staticmethod
    def random(random: Random) -> Settings:
        """Any of them; a third of the pools are so small that sequences get preempted."""
        chunked = random.random() < 0.7
        return Settings(
            prefix_caching=random.random() < 0.7,
            output_caching=random.random() < 0.7,
            chunked_prefill=chunked,
            max_num_batched_tokens=random.choice([8, 17, 40]) if chunked else MAX_BATCHED_TOKENS,
            max_num_partial_prefills=random.choice([1, 3]),
            max_num_seqs=random.choice([2, 5, MAX_NUM_SEQS]),
            num_blocks=random.choice([14, 18, 64]),
            host_blocks=random.choice([0, 6, 40]),
            overlap=random.random() < 0.6,
        )


def block_bytes(info: Any) -> int:
    """What a block of tokens takes in all groups of layers."""
    return int(info.bytes_per_block + sum(group.bytes_per_block for group in info.bounded))


class Bench:
    """Runs requests with any settings on one loaded model. graphs: on a device that captures."""

    def __init__(
        self,
        checkpoint: Path,
        tensor_library: str,
        graphs: GraphConfig | None = None,
        **model: Any,
    ) -> None:
        self.config, self._resolved = make_engine_config(checkpoint, tensor_library)
        self.config = replace(self.config, model=replace(self.config.model, **model))
        if graphs is not None:
            self.config = replace(self.config, graphs=graphs)
            self._resolved = OnCapturingDevice(self._resolved)
        self._executor = SharedExecutor(self.config, self._resolved)
        self.block_bytes = block_bytes(self._executor._info)
        self._num_seq_ids = 0

    @property
    def worker(self) -> Any:
        """The one worker."""
        return self._executor._worker

    @property
    def num_replays(self) -> int:
        """Of what was captured since the cache was made."""
        return sum(work.num_replays for work in self.worker.device.recorded)

    def engine(self, settings: Settings) -> EngineCore:
        """An engine that continues the worker's count of sequences."""
        core = EngineCore(
            settings.apply(self.config, self.block_bytes), self._resolved, self._executor
        )
        core.scheduler._next_seq_id = self._num_seq_ids
        known = range(max(0, self._num_seq_ids - 200), self._num_seq_ids)
        core.scheduler.roster.forgotten += known
        return core

    def run(
        self, settings: Settings, arrivals: list[tuple[int, Request]]
    ) -> tuple[EngineCore, Collector]:
        """Play arrivals (step, request) to their end; the pool must be as it began."""
        core = self.engine(settings)
        collector = play(core, arrivals)
        core.scheduler.check_idle()
        self._num_seq_ids = core.scheduler._next_seq_id
        return core, collector


def play(
    engine: Any, arrivals: list[tuple[int, Request]], collector: Collector | None = None
) -> Collector:
    """Feed an engine and collect its answers."""
    collector = collector or Collector()
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(MAX_STEPS):
        while waiting and waiting[0][0] <= step:
            engine.add(waiting.pop(0)[1])
        if not waiting and not engine.has_work():
            return collector
        collector.take(engine.step())
    raise AssertionError("the engine stalled")


def make_requests(random: Random, count: int) -> list[Request]:
    """Prompts with common beginnings; half greedy, half seeded with filters and penalties."""
    common = [random.randrange(3, VOCAB) for _ in range(30)]
    requests = []
    for index in range(count):
        prompt = common[: random.choice([0, 0, 4, 8, 9, 16])]
        prompt = prompt + [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 14))]
        sampling: dict[str, Any] = {"ignore_eos": random.random() < 0.7}
        if index % 2:
            sampling |= {
                "temperature": random.choice([0.7, 1.0, 1.3]),
                "seed": random.randrange(1000),
                "n": random.choice([1, 1, 2, 3]),
                "top_k": random.choice([0, 0, 20]),
                "top_p": random.choice([1.0, 0.9]),
            }
        if random.random() < 0.3:
            sampling["repetition_penalty"] = 1.2
            sampling["frequency_penalty"] = 0.3
        request = make_request(f"r{index}", prompt, max_tokens=random.randrange(1, 25), **sampling)
        request.eos_token_ids = [2]
        requests.append(request)
    return requests


def answers_alone(bench: Bench, requests: list[Request]) -> dict[str, list[list[int]]]:
    """Each request by itself, with everything turned off."""
    alone = {}
    for request in requests:
        _, collector = bench.run(Settings(), [(0, request)])
        alone[request.request_id] = collector.answers(request.request_id)
    return alone


def poison(bench: Bench) -> None:
    """What lies in blocks that nobody was given: NaN, which no result may show."""
    for layer in bench.worker._runner.caches.tensors:
        for tensor in layer:
            nan = np.full(list(tensor.shape), np.nan, np.float32)
            tensor.copy_(bench.worker.device.to_device(nan))


def count_loads(bench: Bench, patch: pytest.MonkeyPatch) -> Counter[int]:
    """Blocks that come back from host memory from now on, by group of layers."""
    launch, found = bench.worker.launch, Counter[int]()

    def note(step: SchedulerOutput) -> Any:
        for group, own in enumerate((step.copies, *step.copies.more)):
            found[group] += len(own.host_to_device)
        return launch(step)

    patch.setattr(bench.worker, "launch", note)
    return found


def check_captured(
    captured: Bench,
    requests: list[Request],
    alone: dict[str, list[list[int]]],
    num_mixes: int,
) -> Counter[str]:
    """Random mixes over captured decode steps. Returns counts of what happened."""
    seen: Counter[str] = Counter()
    initialize = captured._executor.initialize_cache

    def poisoned(*sizes: int, **named: Any) -> None:
        initialize(*sizes, **named)
        poison(captured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured._executor, "initialize_cache", poisoned)
        for seed in range(num_mixes):
            random = Random(seed)
            settings = replace(Settings.random(random), overlap=seed % 3 > 0)
            chosen = random.sample(requests, random.randrange(4, 9))
            core, collector = captured.run(settings, [(random.randrange(10), r) for r in chosen])
            check(collector, chosen, alone)
            core.scheduler.kv.check()
            seen["steps"] += core.stats().steps_total
            seen["preemptions"] += core.stats().preemptions_total
            seen["replays"] += captured.num_replays  # each engine captures anew
    return seen


def check(collector: Collector, requests: list[Request], alone: dict[str, list[list[int]]]) -> None:
    for request in requests:
        name = request.request_id
        assert name in collector.finished and name not in collector.errors
        assert collector.answers(name) == alone[name], (name, request.sampling)


def check_poisoned_step(
    bench: Bench,
    requests: list[Request],
    alone: dict[str, list[list[int]]],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model raises whenever one prompt's last token is fed; the other requests do not
    notice."""
    used = {t for r in requests for t in r.prompt_token_ids}
    used |= {t for answers in alone.values() for tokens in answers for t in tokens}
    poison = next(t for t in range(3, VOCAB) if t not in used)
    model = bench.worker._runner._model
    forward = model.forward

    def fragile(input_ids: Any, positions: Any, context: Any) -> Any:
        if poison in input_ids.tolist():
            raise ValueError("poisoned")
        return forward(input_ids, positions, context)

    monkeypatch.setattr(model, "forward", fragile)
    bad = make_request("bad", [5, 6, poison], max_tokens=5)
    settings = Settings(max_num_seqs=8, overlap=overlap, prefix_caching=True, host_blocks=8)
    arrivals = [(0, r) for r in requests[:3]] + [(2, bad)] + [(2, r) for r in requests[3:]]
    _, collector = bench.run(settings, arrivals)
    assert collector.errors == {"bad": "FastDeployError"}
    check(collector, requests, alone)


@contextmanager
def counted(bench: Bench) -> Iterator[list[int]]:
    """The num_decodes of every step."""
    launch, found = bench.worker.launch, list[int]()

    def note(step: Any) -> Any:
        found.append(step.num_decodes)
        return launch(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.worker, "launch", note)
        yield found
