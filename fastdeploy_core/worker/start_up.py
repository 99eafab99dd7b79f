"""What a worker does and says once, before it serves: steps of made-up sequences, and limits in words."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import ReportingDevice
from fastdeploy_core.types import BatchRows, NewSequence, SamplingParams, SchedulerOutput

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.plugins.kernels import ChosenKernels

    from .model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Stopwatch:
    """Where the seconds of a start go, for the log."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: list[str] = []

    def lap(self, what: str) -> None:
        """Since the lap before."""
        now = time.perf_counter()
        self._laps.append(f"{what} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)


def dummy_step(
    config: EngineConfig,
    step_id: int,
    lengths: Sequence[int],
    finished: list[int],
    num_drafts: int = 0,
) -> SchedulerOutput:
    """A step of new sequences with so many tokens each and drafts behind them, in blocks from 0 on, with
    room for as many drafts again."""
    params = SamplingParams(top_p=0.9, top_k=50, seed=0, logprobs=1)
    new: list[NewSequence] = []
    first_block = 0
    for number, length in enumerate(lengths):
        num_blocks = -(-(length + 2 * num_drafts) // config.cache.block_size)
        new.append(
            NewSequence(
                seq_id=step_id * config.batch.max_num_seqs + number,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                block_ids=list(range(first_block, first_block + num_blocks)),
                sampling=params,
                seed=number,
            )
        )
        first_block += num_blocks
    rows = BatchRows.of(
        [n.seq_id for n in new],
        [0] * len(new),
        [length + num_drafts for length in lengths],
        drafts={row: [0] * num_drafts for row in range(len(new) if num_drafts else 0)},
    )
    most = config.speculative.num_speculative_tokens if config.speculative is not None else -1
    return SchedulerOutput(
        step_id=step_id,
        new_sequences=new,
        rows=rows,
        finished_seq_ids=finished,
        max_drafts=most,
    )


def warm_up(
    runner: ModelRunner, config: EngineConfig, buckets: Sequence[int], num_blocks: int
) -> None:
    """Run every bucket a step can fall into once, as one prompt and as decodes, so that a device that
    compiles for each shape does so now. Afterwards the sequences are gone."""
    began = time.perf_counter()
    longest = min(config.model.max_model_len, num_blocks * config.cache.block_size)
    most_rows = min(config.batch.max_num_seqs, num_blocks)
    largest = next((b for b in buckets if b >= config.batch.max_num_batched_tokens), max(buckets))
    step_id, finished = 0, list[int]()
    reached = 0
    for bucket in buckets:
        if bucket > largest:
            break
        smallest = reached + 1  # of the numbers of tokens that are padded to this bucket
        for lengths in ([min(bucket, longest)], [1] * min(bucket, most_rows)):
            if smallest <= sum(lengths):
                step = dummy_step(config, step_id, lengths, finished)
                runner.launch(step).wait()
                finished = [n.seq_id for n in step.new_sequences]
                step_id += 1
        reached = bucket
    nobody = BatchRows.of([], [], [])
    runner.launch(SchedulerOutput(step_id=step_id, rows=nobody, finished_seq_ids=finished)).wait()
    logger.info("warm-up: %d shapes in %.1f s", step_id, time.perf_counter() - began)


def device_lines(device: DeviceBackend) -> list[str]:
    """For the start-up table: every limit that is not the widest, and what the device adds."""
    limits = device.limits
    said = (
        (limits.block_sizes, f"KV blocks of {_numbers(limits.block_sizes)} tokens only"),
        (limits.kv_layout != "NHD", f"KV layout {limits.kv_layout}"),
        (not limits.block_sharing, "no KV block belongs to two sequences"),
        (not limits.mixed_batches, "a step has prompts or decodes, never both"),
        (not limits.chunked_prefill, "a prompt runs in one step"),
        (limits.max_prefills_per_step, f"{limits.max_prefills_per_step} prompt(s) per step"),
        (limits.token_buckets, f"steps are padded to {_numbers(limits.token_buckets)} tokens"),
        (not limits.logprobs, "no logprobs"),
    )
    lines = [f"limit of device {device.name}: {words}" for applies, words in said if applies]
    if isinstance(device, ReportingDevice):
        lines += device.report()
    return lines


def kernel_lines(kernels: ChosenKernels) -> list[str]:
    """For the start-up table: whose kernels run."""
    origins = kernels.origins()
    foreign = {o: d for o, d in origins.items() if d != "fastdeploy-core"}
    whose = f" ({', '.join(sorted(set(foreign.values())))})" if foreign else ""
    lines = [f"kernels: {len(foreign)} of {len(origins)} from plugins{whose}"]
    if kernels.fallbacks:
        lines.append(
            f"no kernel of {kernels.device}, the reference dequantizes at every step: "
            f"{', '.join(kernels.fallbacks)}"
        )
    return lines


def turned_off_lines(config: EngineConfig, device: DeviceBackend) -> list[str]:
    """For the start-up table: what was asked for and the device cannot do."""
    limits, batch, cache = device.limits, config.batch, config.cache
    asked = (
        (batch.overlap, limits.overlap, "overlap of scheduling and execution"),
        (cache.swap_space_bytes > 0, limits.host_tier, "the host-memory KV tier"),
        (cache.enable_prefix_caching, limits.block_sharing, "prefix caching"),
        (batch.enable_chunked_prefill, limits.mixed_batches, "prefill beside decode"),
        (batch.enable_chunked_prefill, limits.chunked_prefill, "chunked prefill"),
    )
    return [
        f"turned off: {what}; device {device.name} cannot do it"
        for wanted, possible, what in asked
        if wanted and not possible
    ]


def _numbers(values: Sequence[int] | None) -> str:
    return ", ".join(map(str, values or ()))
