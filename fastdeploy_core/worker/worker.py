"""One rank: builds the device, loads the model, measures memory, and runs steps.

Rank 0 lives in the engine process, the others in processes of their own; all get the same messages.
Called by engine/executor.py only. What a step does is model_runner.py's.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import CompilingDevice, DeviceBackend
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.kvcache import MemoryProfile, pool_bytes
from fastdeploy_core.loading.drafters import DrafterMaker
from fastdeploy_core.loading.loader import LoadedModel, load_model
from fastdeploy_core.memory.low_water import LowWater, give_back_freed, probe
from fastdeploy_core.plugins.kernels import build_kernel_table, kernel_facts
from fastdeploy_core.plugins.opening import open_device
from fastdeploy_core.plugins.start_report import (
    Stopwatch,
    device_lines,
    kernel_lines,
    several_lines,
    turned_off_lines,
)
from fastdeploy_core.sampling.penalties import PenaltyTables
from fastdeploy_core.sampling.state import SamplingState
from fastdeploy_core.scheduler.settings import step_limits
from fastdeploy_core.types import SchedulerOutput
from fastdeploy_core.types.worker import LayerGroup, WorkerInfo

from .graph_sizes import graph_sizes
from .model_runner import ModelRunner
from .results import PendingOutput
from .sampling_step import can_capture_sampling
from .start_up import drafted_step, dummy_step, largest_padded_step, unlike_steps, warm_up

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator
    from fastdeploy_core.plugins.kernels import ChosenKernels
    from fastdeploy_core.plugins.resolve import ResolvedPlugins

    from .layout import StepShapes

logger = logging.getLogger(__name__)

# How many times smaller than the largest the first steps are from which its memory is bounded.
SMALL_PARTS = (32, 8)
SEEN_BYTES = 1 << 20


class Worker:
    """A rank of a tensor-parallel group."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlugins,
        rank: int = 0,
        world_size: int = 1,
        address: str = "",
    ) -> None:
        self.config, self.resolved = config, resolved
        self.rank, self.world_size, self.address = rank, world_size, address
        self._free_before = 0  # bytes of the device, before the weights
        self.device: DeviceBackend | None = None
        self.experts: Any = None
        self._communicator: Communicator | None = None
        self._runner: ModelRunner | None = None

    def load(self) -> WorkerInfo:
        """Build the device, load the weights, and measure what a step of maximal size needs.

        All ranks must be loading at the same time: they meet in collectives.
        """
        clock = Stopwatch()
        device = self.device = open_device(self.config, self.resolved, self.rank, self.world_size)
        clock.lap("device")
        if not gc.isenabled():  # a process of ours that starts: what was imported is no garbage
            gc.freeze()
        if self.world_size > 1:
            self._communicator = device.communicator(self.rank, self.world_size, self.address)
        kernels = build_kernel_table(
            device.name,
            kernel_facts(self.config.model, device.xp.name),
            self.config.device,
            resolved=self.resolved,
        )
        free_before = self._free_before = device.memory().free_bytes
        loaded = self._load_model(device, kernels, free_before)
        sizes, about_graphs = graph_sizes(
            *(self.config, device.limits, loaded.attention.values(), self.world_size),
            can_sample=can_capture_sampling(device, kernels),
            specs=loaded.attention,
        )
        drafters = None
        if self.config.speculative is not None:
            drafters = DrafterMaker(
                self.config, self.config.speculative, device, kernels, loaded, self.resolved
            ).make(self.rank, captures=bool(sizes))
        gc.collect()
        give_back_freed()
        weight_bytes = loaded.weight_bytes
        if not device.limits.shares_host_memory:  # where others take and give, too
            weight_bytes = max(0, free_before - device.memory().free_bytes)
        clock.lap("weights")
        self._runner = ModelRunner(
            self.config, device, kernels, loaded, self.rank, self._communicator, sizes, drafters
        )
        self.experts = loaded.builder.expert_ranks
        if self._rehearse(device, weight_bytes):
            clock.lap("kernels compiled")
        info = self._info(device, loaded, kernels, weight_bytes, about_graphs)
        clock.lap("memory measured")
        logger.info("rank %d: %s", self.rank, clock)
        return info

    def initialize_cache(
        self,
        num_blocks: int,
        num_host_blocks: int = 0,
        *more_blocks: int,
        host_files: Sequence[str] = (),
    ) -> None:
        """Allocate the KV pool, and the host tier when num_host_blocks is above 0, in files where
        those of all ranks are named, group by group; then capture graphs over it. more_blocks: see
        Caches.allocate. All ranks at the same time, as in load()."""
        runner, device = self._ready()
        own_files = host_files[self.rank :: self.world_size]
        try:
            self._allocate_cache((num_blocks, num_host_blocks, *more_blocks), own_files)
        except Exception as error:
            if not device.is_oom(error):
                raise
            counts = zip((num_blocks, *more_blocks), runner.caches.block_bytes(), strict=False)
            size = sum(count * one for count, one in counts) / 1024**3
            raise ResourceError(
                f"the KV cache of {num_blocks} blocks ({size:.2f} GiB) does not fit into memory; "
                "lower --gpu-memory-utilization or --num-gpu-blocks-override"
            ) from error
        if runner.shapes is not None:
            warm_up(runner, self.config, runner.shapes, num_blocks)
        runner.capture_graphs()
        runner.experts = self.experts

    def launch(self, step: SchedulerOutput) -> PendingOutput:
        """Queue one step's work on the device; the result is fetched with PendingOutput.wait()."""
        return self._ready()[0].launch(step)

    @property
    def sampling(self) -> SamplingState | None:
        """What rank 0 knows for sampling; any thread may ask it of grammars."""
        return self._ready()[0].state

    def close(self) -> None:
        """Give the device back."""
        for part in (self.experts, self._communicator, self.device):
            if part is not None:
                part.close()
        self._runner = self._communicator = self.device = None

    def _ready(self) -> tuple[ModelRunner, DeviceBackend]:
        if self._runner is None or self.device is None:
            raise WorkerError(f"worker rank {self.rank} has no model; call load() first")
        return self._runner, self.device

    def _allocate_cache(self, sizes: Sequence[int], host_files: Sequence[str]) -> None:
        self._ready()[0].allocate_cache(*sizes, host_files=host_files, is_touched=False)

    def _load_model(
        self, device: DeviceBackend, kernels: ChosenKernels, free_bytes: int
    ) -> LoadedModel:
        ranks = self.rank, self.world_size, self._communicator
        try:
            return load_model(self.config, device, kernels, *ranks, self.resolved.load)
        except Exception as error:
            if not device.is_oom(error):
                raise
            total = device.memory().total_bytes
            raise ResourceError(
                f"the weights do not fit into the memory of rank {self.rank}'s device: "
                f"{free_bytes / 1024**3:.2f} of {total / 1024**3:.2f} GiB were free; end what else "
                "uses it, or choose a larger --tensor-parallel-size or a --quantization"
            ) from error

    def _info(
        self,
        device: DeviceBackend,
        loaded: LoadedModel,
        kernels: ChosenKernels,
        weight_bytes: int,
        about_graphs: str,
    ) -> WorkerInfo:
        runner, config, limits = self._ready()[0], self.config, device.limits
        bytes_per_block, *more_bytes = runner.caches.block_bytes()
        size, by_hand = bytes_per_block + sum(more_bytes), limits.kv_memory_bytes
        measure = partial(self._profile, weight_bytes)
        available, arithmetic = pool_bytes(config.cache, size, by_hand, measure)
        rules = zip(runner.caches.rules, more_bytes, strict=True)
        report = [
            f"device {device.name} on {device.xp.name} {device.xp.version}, {loaded.dtype}",
            *kernel_lines(kernels),
            f"memory: {arithmetic}",
            about_graphs,
            *several_lines(runner.max_decodes),
            *loaded.report,
            *device_lines(device),
            *turned_off_lines(config, device),
        ]
        return WorkerInfo(
            num_layers=len(loaded.builder.kv_layers),
            vocab_size=loaded.shapes.vocab_size,
            max_model_len=config.model.max_model_len,
            weight_bytes=weight_bytes,
            bytes_per_block=bytes_per_block,
            bounded=[LayerGroup(rule.kind, rule.tokens, size) for rule, size in rules],
            kv_layout=repr(runner.caches.shapes(*[1] * (1 + len(more_bytes)))),
            available_bytes=available,
            memory_arithmetic=arithmetic,
            block_size=config.cache.block_size,
            block_sharing=limits.block_sharing,
            **step_limits(limits),
            chunked_prefill=limits.chunked_prefill,
            overlap=limits.overlap and config.batch.overlap,
            asynchronous=limits.asynchronous,
            on_host=limits.shares_host_memory and not limits.overlap,
            host_tier=limits.host_tier,
            logprobs=limits.logprobs,
            **runner.facts(),
            device=device.name,
            tensor_library=device.xp.name,
            drivers={
                "device": device.name,
                "attention": ", ".join(sorted({b.name for b in loaded.attention.values()})),
            },
            report=report,
        )

    def _rehearse(self, device: DeviceBackend, weight_bytes: int) -> bool:
        """Where kernels are compiled at first use: meet all now, so that they are compiled side by
        side. Whether there was anything to do."""
        if not isinstance(device, CompilingDevice):
            return False
        runner = self._ready()[0]
        steps, num_blocks = self._largest_steps()
        with device.compile_only(), _beside(weight_bytes):
            runner.allocate_cache(num_blocks, 0)
            runner.run_largest(steps)
            runner.rehearse(unlike_steps(self.config, steps[1]))
            runner.free_cache()
        return True

    def _largest_steps(self, part: int = 1) -> tuple[list[SchedulerOutput], int]:
        """Those of largest_steps(); prompts bring pictures, if the model takes any."""
        runner = self._ready()[0]
        steps, num_blocks = largest_steps(self.config, part, runner.shapes)
        if runner.media is not None:
            runner.media.bring_largest(steps[0].new_sequences, self.config)
        return steps, num_blocks

    def _profile(self, weight_bytes: int) -> MemoryProfile:
        """What the largest step takes. Where memory is the host's and there is plenty, a small step
        is enough to know: a slow device would need seconds for the largest one."""
        alone = self.world_size == 1 and not self.config.parallel.shares_experts
        for part in SMALL_PARTS if alone and self._ready()[1].limits.shares_host_memory else ():
            profile = self._measure(weight_bytes, part)
            if profile.available_bytes >= profile.most_bytes:
                return profile
        return self._measure(weight_bytes)

    def _measure(self, weight_bytes: int, part: int = 1) -> MemoryProfile:
        """Run the largest prefill and the widest sampling there can be, and see what they take.
        With `part` they are so many times shorter; nothing grows faster than the square of the
        length."""
        runner, device = self._ready()
        steps, num_blocks = self._largest_steps(part)
        before, look = device.memory(), probe(device)
        untouched = look().free_bytes
        with _beside(weight_bytes):
            with LowWater(look) as water:
                runner.allocate_cache(num_blocks, 0)
                held = sum(device.xp.nbytes(x) for layer in runner.caches.tensors for x in layer)
                runner.run_largest(steps)
            graph_bytes = runner.graph_bytes()
            runner.free_cache()
            gc.collect()
        logits_bytes = PenaltyTables.num_bytes(self.config.batch.max_num_seqs, runner.vocab_size)
        peak = untouched - water.free_bytes - held
        limits, config = device.limits, self.config
        usable = before.total_bytes * config.cache.memory_utilization
        others = before.total_bytes - self._free_before if usable <= self._free_before else 0
        per_sequence = -(-config.model.max_model_len // config.cache.block_size)
        return MemoryProfile(
            total_bytes=before.total_bytes,
            free_bytes=before.free_bytes,
            weight_bytes=weight_bytes,
            # A step too small to be seen is not taken for one that needs nothing.
            step_bytes=max(SEEN_BYTES if part > 1 else 0, peak) * part**2 + logits_bytes,
            is_bound=part > 1,
            graph_bytes=graph_bytes,
            utilization=self.config.cache.memory_utilization,
            shared_with=config.parallel.num_ranks if limits.shares_host_memory else 0,
            most_bytes=runner.caches.most_bytes(config.batch.max_num_seqs, per_sequence),
            others_bytes=0 if limits.shares_host_memory else others,
        )


@contextmanager
def _beside(weight_bytes: int) -> Iterator[None]:
    """The largest steps run; a failure says what they had to fit beside."""
    try:
        yield
    except ResourceError as error:
        raise ResourceError(
            f"the largest step does not fit into memory beside the weights "
            f"({weight_bytes / 1024**3:.2f} GiB): {error}"
        ) from error


def largest_steps(
    config: EngineConfig, part: int = 1, shapes: StepShapes | None = None
) -> tuple[list[SchedulerOutput], int]:
    """The step with most tokens in fewest rows, the step with most rows; and blocks for them. With
    `part` the tokens are divided by it."""
    if shapes is not None:
        return largest_padded_step(config, shapes)
    longest, batch = -(-config.model.max_model_len // part), config.batch
    most = config.speculative.num_speculative_tokens if config.speculative is not None else 0
    # Drafts that every row can have at once; drafters make as many again.
    k = max(0, min(most, batch.max_num_batched_tokens // batch.max_num_seqs - 1, longest - 1))
    left = -(-batch.max_num_batched_tokens // part)
    lengths: list[int] = []
    while left > 0 and len(lengths) < batch.max_num_seqs:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    steps = [dummy_step(config, 0, lengths, [])]
    ids = [new.seq_id for new in steps[0].new_sequences]
    steps.append(dummy_step(config, 1, [1] * batch.max_num_seqs, ids, 1 + 2 * k))
    if k:
        steps.append(drafted_step(config, steps[-1], k))
    num_blocks = max(sum(len(n.block_ids) for n in s.new_sequences) for s in steps)
    return steps, num_blocks
