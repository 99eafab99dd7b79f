"""Engines on the fake device, for tests: no tensor library, predictable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_core.config import (
    BatchConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    WatchdogConfig,
)
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import (
    BatchRows,
    Request,
    RequestOutputDelta,
    SamplingParams,
    SchedulerOutput,
    TokenDeltas,
    each_delta,
)
from fastdeploy_core.types.sampling import sequence_seed
from fastdeploy_core.types.worker import WorkerInfo
from fastdeploy_testing.fakes import FaultyWorker, NullModel, null_hf_config

VOCAB_SIZE = 64
EOS = 3


def worker_info(**limits: Any) -> WorkerInfo:
    """What a worker says of itself, for tests of the batch scheduler alone."""
    sizes = dict.fromkeys(
        ("num_layers", "vocab_size", "max_model_len", "bytes_per_block", "available_bytes"), 1
    )
    return WorkerInfo(**sizes, **limits)


class WatchedWorker(FaultyWorker):
    """Remembers where each row of the last step was written: messages say the most that can be."""

    def launch(self, step: SchedulerOutput) -> Any:
        self.written: dict[int, tuple[int, int]] = {}  # by seq_id: the first token and how many
        return super().launch(step)

    def _write(self, state: Any, start: int, fed: list[int]) -> None:
        first, count = self.written.get(state.new.seq_id, (start, 0))
        self.written[state.new.seq_id] = (first, count + len(fed))
        super()._write(state, start, fed)


class InlineExecutor:
    """One rank, in the caller's thread: what overlaps in production happens in the same order."""

    world_size = 1
    sampling = experts = None

    def __init__(self, config: EngineConfig) -> None:
        self.worker = WatchedWorker(config)
        self.steps: list[SchedulerOutput] = []  # with their rows, also where these just go on
        self.num_explicit = 0  # steps that came with rows
        self._rows = BatchRows.of([], [], [])
        self.is_closed = False

    def load(self) -> list[Any]:
        return [self.worker.load()]

    def initialize_cache(
        self, num_blocks: int, num_host_blocks: int, *, host_files: Sequence[str] = ()
    ) -> None:
        self.worker.initialize_cache(num_blocks, num_host_blocks, host_files=host_files)

    def submit(self, step: SchedulerOutput) -> Future[Any]:
        future: Future[Any] = Future()
        self.num_explicit += step.rows is not None
        self._rows = self._rows.next(step.num_decodes) if step.rows is None else step.rows
        self.steps.append(msgspec.structs.replace(step, rows=self._rows))
        try:
            future.set_result(self.worker.launch(step).wait())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self.is_closed = True


def make_config(
    *,
    device: str = "null",
    num_blocks: int = 64,
    block_size: int = 4,
    host_blocks: int = 0,
    max_model_len: int = 128,
    tensor_parallel_size: int = 1,
    num_drafts: int = 0,
    prefix_caching: bool = True,
    output_caching: bool = True,
    events: KVEventsConfig | None = None,
    faults: tuple[dict[str, Any], ...] = (),
    watchdog: WatchdogConfig | None = None,
    null: dict[str, Any] | None = None,
    **batch: Any,
) -> EngineConfig:
    """A configuration of the fake device; `batch` goes to BatchConfig."""
    options = {"vocab_size": VOCAB_SIZE, **(null or {})}
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **batch}
    speculative = None
    if num_drafts:
        speculative = SpeculativeConfig(method="null", num_speculative_tokens=num_drafts)
    return EngineConfig(
        model=ModelConfig(
            path=Path("null"),
            tokenizer_path=Path("null"),
            served_names=("null",),
            max_model_len=max_model_len,
            hf_config=null_hf_config(faults=faults, **options),
        ),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks_override=num_blocks,
            swap_space_bytes=host_blocks * block_size * 8,
            enable_prefix_caching=prefix_caching,
            enable_output_caching=output_caching,
            events=events,
        ),
        batch=BatchConfig(**settings),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        device=DeviceConfig(device=device),
        speculative=speculative,
        watchdog=watchdog or WatchdogConfig(),
    )


def make_core(**options: Any) -> EngineCore:
    """An engine core on an InlineExecutor."""
    config = make_config(**options)
    return EngineCore(config, ResolvedPlugins([], {}), InlineExecutor(config))


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int | None = 8,
    eos: bool = False,
    tenant: str = "",
    priority: int = 0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """A request; greedy unless a temperature is given."""
    sampling.setdefault("temperature", 0.0)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        eos_token_ids=[EOS] if eos else [],
        tenant=tenant,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
    )


def expected_answers(request: Request, max_model_len: int = 128) -> list[list[int]]:
    """The n answers a request must get, computed without an engine."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    limit = max_model_len - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    answers = []
    for index in range(sampling.n):
        seed = 0 if sampling.seed is None else sequence_seed(sampling.seed, index)
        tokens = NullModel(VOCAB_SIZE).expected(prompt, limit, sampling, seed)
        stops = {*(sampling.stop_token_ids or ())}
        if not sampling.ignore_eos:
            stops |= {*request.eos_token_ids}
        end = next((i + 1 for i, t in enumerate(tokens) if t in stops), limit)
        answers.append(tokens[:end])
    return answers


class Collector:
    """Puts deltas together and checks that their positions are without gaps."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, str]] = {}
        self.errors: dict[str, str] = {}
        self.first: dict[str, RequestOutputDelta] = {}
        self.order: list[str] = []  # requests in the order of their first delta
        self.finished: list[str] = []
        self._positions: dict[str, int] = {}

    def take(self, outputs: list[RequestOutputDelta | TokenDeltas]) -> None:
        for delta in each_delta(outputs):
            name = delta.request_id
            assert name not in self.finished, f"{name} was answered after its end"
            assert delta.position == self._positions.get(name, 0)
            self._positions[name] = delta.position + 1
            if delta.position == 0:
                self.first[name] = delta
                self.order.append(name)
            for seq in delta.sequences:
                reasons = self.reasons.setdefault(name, {})
                assert seq.index not in reasons, "a finished sequence went on"
                self.tokens.setdefault(name, {}).setdefault(seq.index, []).extend(seq.token_ids)
                if seq.finish_reason is not None:
                    reasons[seq.index] = seq.finish_reason.value
            if delta.error is not None:
                self.errors[name] = delta.error_type
            if delta.finished:
                self.finished.append(name)

    def answers(self, name: str) -> list[list[int]]:
        """The answers of a request by index."""
        return [tokens for _, tokens in sorted(self.tokens.get(name, {}).items())]


def run(core: EngineCore, requests: list[Request], max_steps: int = 5000) -> Collector:
    """Run requests that arrive together to their end."""
    collector = Collector()
    for request in requests:
        core.add(request)
    for _ in range(max_steps):
        if not core.has_work():
            break
        collector.take(core.step())
    assert not core.has_work(), "the engine did not come to an end"
    core.scheduler.check_idle()
    return collector
