"""The engine core: schedule, execute, update, answer. One thread calls it.

With async scheduling, one step is always queued after the running one, so the device never waits
for the scheduler. A step scheduled early assumes that every running sequence continues.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import InvalidRequest, Unavailable, WorkerError
from fastdeploy_core.kvcache import CachePlan, KVCacheManager, plan_cache
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.scheduler import BatchScheduler, ScheduledStep
from fastdeploy_core.types import (
    InstanceRole,
    ModelRunnerOutput,
    Request,
    RequestOutputDelta,
    TokenDeltas,
)
from fastdeploy_core.types.engine import EngineInfo, EngineStats
from fastdeploy_core.types.sampling import check_logprobs
from fastdeploy_core.types.worker import WorkerInfo

from .executor import Executor, StepResult
from .media import check_media
from .settings import make_settings
from .step_time import StepTime

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolved import ResolvedPlugins

logger = logging.getLogger(__name__)

# Consecutive failed steps after which the device is given up. A request that is to blame is found
# and removed within two steps, so this leaves room for several such requests in a row.
MAX_FAILURES_IN_A_ROW = 16
# Plans in a row with nothing to run and nothing in flight, before a request is failed.
MAX_IDLE_PLANS = 4
GRAMMAR_S = 0.0002  # between looks at what is made for grammars, with nothing else to do
AWAIT_S = 0.02  # at most, for blocks from outside with nothing else to do; see `wake`


class EngineCore:
    """A model being served: requests in, deltas out."""

    has_one_client = False  # nobody waits for the end of another one's step

    def __init__(
        self, config: EngineConfig, resolved: ResolvedPlugins, executor: Executor | None = None
    ) -> None:
        """Load the model and size the KV cache; raises ConfigError, PluginError or WorkerError."""
        started = time.monotonic()
        self.config = config
        self._executor = executor or Executor(config, resolved)
        self._remote: Any = None  # parts of fd-scale-out, where asked for: _make_remote's,
        self._events: Any = None  # and KVEvents
        try:
            infos = self._executor.load()
            plan = plan_cache(infos, config.cache, config.batch, config.model.max_model_len)
            settings = make_settings(config, infos[0], resolved.speculative)
            self._remote = self._make_remote(infos, plan, resolved)
            paths = () if self._remote is None else self._remote.paths
            self._executor.initialize_cache(*plan.sizes, host_files=paths)
            worker = infos[0]
            caching = config.cache.enable_prefix_caching and worker.block_sharing
            if config.cache.events is not None and caching:
                self._events = part("kv-events", "--kv-events-config")(
                    *(config.cache.events, worker.block_size, resolved.speculative.key_lookahead),
                    config.parallel.data_parallel_rank,
                )
        except BaseException:
            self.close()
            raise
        remote = self._remote
        kv = KVCacheManager(
            plan.num_blocks,
            worker.block_size,
            num_host_blocks=plan.num_host_blocks,
            enable_prefix_caching=caching,
            enable_output_caching=config.cache.enable_output_caching,
            model_identity=_model_identity(config) if remote is None else remote.identity,
            key_lookahead=resolved.speculative.key_lookahead,
        )
        kv.add_groups(plan.bounded, cuts=settings.batch.enable_chunked_prefill)
        if self._events is not None:
            kv.prefix.on_change = self._events.note
        self.scheduler = BatchScheduler(settings, kv)
        self._step_time = StepTime(self.scheduler.roster.clock, is_queued=worker.asynchronous)
        self.scheduler.planner.most_prompt_tokens = self._most_prompt_tokens
        if remote is not None:
            remote.open(self.scheduler)
        self._depth = 2 if (overlap := config.batch.overlap and worker.overlap) else 1
        self._in_flight: deque[tuple[ScheduledStep, StepResult]] = deque()
        self._vocab_size, self._has_logprobs = worker.vocab_size, worker.logprobs
        # Requests that are held until what their grammars need is built.
        self._sampling = self._executor.sampling
        self.scheduler.planner.wants_empty = lambda: not self._in_flight and self._is_awaited
        self._building: dict[str, Future[Any]] = {}
        self._features = frozenset.intersection(*(info.features for info in infos))
        self._num_failures = self._num_idle_plans = 0
        # For part `rollout-engine`: whether requests are taken; and whether no step is begun.
        self.admits, self.is_held = True, False
        self._stats, self.experts = self.scheduler.counters, self._executor.experts
        self.info = self._describe(infos, plan, overlap, caching, time.monotonic() - started)
        for line in self.info.report:
            logger.info("%s", line)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest or RequestTooLong and stays unchanged then."""
        if not self.admits:
            raise Unavailable("the engine is paused or asleep; call resume() or wake_up() first")
        self.check(request)
        remote = self._remote
        request = request if remote is None else remote.prepare(request)
        self.scheduler.add(request)
        seq = self.scheduler.leader(request.request_id) if remote is not None else None
        if remote is not None and seq and remote.fetch(request, seq.table, seq.token_ids):
            self.scheduler.hold(request.request_id)
        elif request.grammar is not None and self._sampling is not None:
            self._building[request.request_id] = self._sampling.prepare(request)
            self.scheduler.hold(request.request_id)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the request could never run; may be called from any thread."""
        try:
            if request.handover.startswith("prefill") and not self.config.handover.transport:
                raise InvalidRequest("this server hands nothing over; start it with --kv-transport")
            self._check_tokens(request)
            self._check_extras(request)
            self.scheduler.check(request)
        except InvalidRequest as error:
            self.count_rejection(type(error).__name__)
            raise

    def count_rejection(self, error_type: str) -> None:
        """For the metrics: a request was refused."""
        self._stats.requests_rejected_total[error_type] += 1

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without a further delta; unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do: run, take a result, return an answer, wait."""
        if self.is_held:
            return bool(self._in_flight) or self.scheduler.outcome.has_deltas
        is_awaited = self._building or (self._remote is not None and self._remote.is_awaited)
        return self.scheduler.has_work() or bool(self._in_flight or is_awaited or self._is_awaited)

    @property
    def _is_awaited(self) -> bool:
        """Whether experts here are to serve tokens of other engines, in a step that all take."""
        return self.experts is not None and self.experts.is_awaited

    def step(self) -> list[RequestOutputDelta | TokenDeltas]:
        """Schedule, execute, update, answer. WorkerError means that the engine is dead."""
        if self._remote is not None:
            is_busy = self._in_flight or self._building or self._is_awaited
            wait_s = 0.0 if is_busy or self.scheduler.has_work() else AWAIT_S
            for request_id, first in self._remote.ready(wait_s):
                self.scheduler.release(request_id, first)
            if self.scheduler.outcome.has_deltas:  # a first token waits for no step
                self._remote.told(outputs := self.scheduler.take_deltas())
                return outputs
        if self._building:
            for request_id in [name for name, built in self._building.items() if built.done()]:
                del self._building[request_id]
                self.scheduler.release(request_id)
        self._submit_ahead(self._depth)
        self._take_oldest()
        if self._events is not None:
            self._events.publish()
        outputs = self.scheduler.take_deltas()
        if self._remote is not None:
            self._remote.told(outputs)
        return outputs

    def begin(self) -> bool:
        """Begin one step more, without waiting; False: as many as may be are begun."""
        before = len(self._in_flight)
        self._submit_ahead(min(before + 1, self._depth))
        return len(self._in_flight) > before

    def is_busy(self) -> bool:
        """Whether `step` would wait for the device."""
        return bool(self._in_flight) and not self._in_flight[0][1].done()

    def wake(self) -> None:
        """There is something to do: `step` is not to wait for blocks; any thread."""
        if self._remote is not None:
            self._remote.wake()

    def set_role(self, role: InstanceRole) -> None:
        """See AsyncEngine.set_role; any thread. Without --kv-transport there is no role."""
        if self.config.handover.transport:
            self._remote.set_role(role)

    def stats(self) -> EngineStats:
        """Gauges and counters; may be called from another thread."""
        stats = self.scheduler.stats()
        if self._remote is not None:
            self._remote.count(stats)
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing is forgotten, while there is work."""
        if self.has_work():
            return False
        self.scheduler.kv.clear_cache()
        if self._events is not None:
            self._events.publish()
        return True

    def control_workers(self, action: dict[str, Any]) -> list[dict[str, Any]]:
        """What part `rollout-worker` answers on each rank; call with no step in flight."""
        return self._executor.control(action)

    def close(self) -> None:
        """End worker processes, give the device back; idempotent."""
        if self._events is not None:
            self._events.close()
        if self._remote is not None:
            self._remote.close()
        self._executor.close()

    def _make_remote(
        self, infos: list[WorkerInfo], plan: CachePlan, resolved: ResolvedPlugins
    ) -> Any:
        """StoredBlocks or Handovers: blocks come from outside, and go there."""
        config = self.config
        if config.cache.kv_store:
            make = part("kv-store", "--kv-store")
            return make(config, infos, plan, resolved.load("kv_store"))
        if config.handover.transport:
            make = part("kv-handover", "--kv-transport")
            return make(config, infos, plan, resolved.load("kv_transport"))
        return None

    def _submit_ahead(self, depth: int) -> None:
        started = time.perf_counter()
        while len(self._in_flight) < depth and not self.is_held:
            if self._in_flight and self._step_time.is_awaited(self._in_flight[-1][0]):
                break
            most_steps = self._sampling.most_steps() if self._sampling is not None else {}
            step = self.scheduler.schedule(most_steps)
            if step is None:
                self._check_idle(most_steps)
                break
            self._num_idle_plans = 0
            if self._remote is not None:
                self._remote.note(step.output.step_id)
            try:
                self._in_flight.append((step, self._executor.submit(step.output)))
            except KeyboardInterrupt as error:  # the caller may go on: what it holds is let go
                while self._in_flight:
                    self._take_oldest()
                self._take_failure(step, error)
                raise
        self._stats.schedule_s += time.perf_counter() - started

    def _most_prompt_tokens(self) -> tuple[int, bool]:
        num_requests = 1 if self.has_one_client else self.scheduler.num_requests
        return self._step_time.most_prompt_tokens(num_requests)

    def _take_oldest(self) -> None:
        if not self._in_flight:
            return
        step, future = self._in_flight[0]
        started = time.perf_counter()
        try:
            output = future.result()  # Ctrl-C while this waits leaves the step in flight
        except Exception as error:
            self._in_flight.popleft()
            self._take_failure(step, error)
            return
        self._in_flight.popleft()
        received = time.perf_counter()
        if self._remote is not None:
            self._remote.settle(step.output.step_id, is_done=True)
        self.scheduler.update(step, output)
        self._step_time.note(step, output.execute_s)
        self._num_failures = 0
        self._count(step, output, received - started, time.perf_counter() - received)

    def _take_failure(self, step: ScheduledStep, error: BaseException) -> None:
        """A step failed. Its sequences are run again one by one, so that only the one to blame
        fails; steps submitted after it are void. Some failures end the engine."""
        stats = self._stats
        stats.step_failures_total += 1
        self._num_failures += 1
        name = type(error).__name__
        logger.error("step %s failed", step.output.step_id, exc_info=error)
        if isinstance(error, WorkerError):
            raise error
        if self._executor.world_size > 1 or self.experts is not None:
            raise WorkerError(
                f"rank 0 failed in a step ({name}), so the ranks disagree; see the log"
            ) from error
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise WorkerError(
                f"{self._num_failures} steps failed one after the other, the last with {name}; "
                "see the log"
            ) from error
        steps = [step]
        while self._in_flight:
            later, future = self._in_flight.popleft()
            with contextlib.suppress(Exception):  # the step is void whether it failed or not
                future.result()
            steps.append(later)
        if self._remote is not None:
            for failed in steps:
                self._remote.settle(failed.output.step_id, is_done=False)
        self.scheduler.fail(steps, f"running the model failed for this request ({name})")

    def _check_idle(self, most_steps: Mapping[int, int]) -> None:
        """Requests wait, but nothing runs and nothing could be scheduled. If that lasts, the oldest
        request fails, so that the others do not wait for ever."""
        if not self._in_flight and (self._building or 0 in most_steps.values()):
            time.sleep(GRAMMAR_S)
            return
        if self._in_flight or self.scheduler.num_requests == self.scheduler.num_held:
            return
        self._num_idle_plans += 1
        if self._num_idle_plans >= MAX_IDLE_PLANS:
            self._num_idle_plans = 0
            logger.error("nothing can be scheduled: %s", self.stats())
            self.scheduler.fail_oldest("no room in the KV cache for this request; try again later")

    def _check_extras(self, request: Request) -> None:
        missing = request.extras.needs - self._features if request.extras else None
        if missing:
            raise InvalidRequest(
                f"this engine's workers do not serve {', '.join(sorted(missing))}; what they serve "
                f"beside token ids: {', '.join(sorted(self._features)) or 'nothing'}",
                param=min(missing),
            )
        if "pooling" in self._features and not request.is_pooled:
            raise InvalidRequest("this engine pools prompts (--runner pooling), generates no text")
        if self._features:
            check_media(request)

    def _check_tokens(self, request: Request) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        if prompt and not (min(prompt) >= 0 and max(prompt) < self._vocab_size):
            raise InvalidRequest(
                f"the prompt has a token id outside 0 to {self._vocab_size - 1}, which is what the "
                "model knows",
                param="prompt",
            )
        sampling.check_vocabulary(self._vocab_size)
        check_logprobs(sampling, self._vocab_size, self.config.max_logprobs)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(sampling, name) is not None and not self._has_logprobs:
                raise InvalidRequest(f"{name} is not possible on this device", param=name)

    def _count(
        self, step: ScheduledStep, output: ModelRunnerOutput, wait_s: float, update_s: float
    ) -> None:
        stats = self._stats
        stats.steps_total += 1
        stats.step_tokens_total += step.num_tokens
        stats.last_step_num_seqs = num_seqs = step.num_rows
        stats.step_sequences_total += num_seqs * step.num_decodes
        stats.wait_s += wait_s
        stats.update_s += update_s
        stats.execute_s += output.execute_s
        stats.model_s += output.model_s
        stats.draft_s += output.draft_s
        stats.draft_failures_total = max(stats.draft_failures_total, output.draft_failures)
        stats.last_step_s = output.execute_s

    def _describe(
        self,
        infos: list[WorkerInfo],
        plan: CachePlan,
        overlap: bool,
        caching: bool,
        startup_s: float,
    ) -> EngineInfo:
        config, worker = self.config, infos[0]
        # Every rank reports; equal lines are shown once.
        report = list(dict.fromkeys(line for info in infos for line in info.report)) + plan.report
        if config.cache.enable_prefix_caching and not caching:
            report.append("prefix cache off: the device cannot share blocks between sequences")
        if config.cache.events is not None:
            at = config.cache.events.endpoint if caching else "none, since the prefix cache is off"
            report.append(f"KV events: {at}")
        if self._remote is not None:
            report.append(self._remote.report)
        return EngineInfo(
            num_blocks=plan.num_blocks,
            num_host_blocks=plan.num_host_blocks,
            block_size=worker.block_size,
            max_model_len=config.model.max_model_len,
            vocab_size=worker.vocab_size,
            max_num_seqs=config.batch.max_num_seqs,
            max_num_batched_tokens=config.batch.max_num_batched_tokens,
            max_request_tokens=self.scheduler.max_request_tokens,
            served_names=list(config.model.served_names),
            model_path=str(config.model.path),
            architecture=config.model.architecture,
            dtype=config.model.dtype,
            device=worker.device,
            tensor_library=worker.tensor_library,
            tensor_parallel_size=len(infos),
            drivers=worker.drivers,
            overlap=overlap,
            on_host=worker.on_host,
            prefix_caching=caching,
            weight_bytes=sum(info.weight_bytes for info in infos),
            bytes_per_block=sum(info.bytes_per_block for info in infos),
            bounded_bytes=sum(
                plan_of.num_blocks * group.bytes_per_block
                for info in infos
                for plan_of, group in zip(plan.bounded, info.bounded, strict=True)
            ),
            startup_s=startup_s,
            epoch=config.request_scheduler.epoch or secrets.randbits(63),
            report=report,
        )


def _model_identity(config: EngineConfig) -> str:
    """A text that differs for models whose cached blocks must not be shared."""
    model = config.model
    parts = (model.path, model.dtype, model.quantization, config.cache.kv_dtype)
    return "\0".join(str(part) for part in parts)
