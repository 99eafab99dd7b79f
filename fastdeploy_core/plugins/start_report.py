"""The start-up table: what a device can do, whose kernels run, what was asked for in vain; and how
long the parts of a start took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import ReportingDevice

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend, StepBuckets

    from .kernels import ChosenKernels


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
        (limits.step_buckets, _bucket_words(limits.step_buckets)),
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
            f"no kernel of {kernels.device}, the reference serves, which is slower: "
            f"{', '.join(kernels.fallbacks)}"
        )
    return lines


def several_lines(max_decodes: int) -> list[str]:
    """What is said of decodes that follow each other without the host."""
    return [f"decode steps in one go: up to {max_decodes}"] if max_decodes > 1 else []


def turned_off_lines(config: EngineConfig, device: DeviceBackend) -> list[str]:
    """For the start-up table: what was asked for and the device cannot do."""
    limits, batch, cache = device.limits, config.batch, config.cache
    most_rows = max(limits.step_buckets.decode_rows) if limits.step_buckets else batch.max_num_seqs
    fits_rows = batch.max_num_seqs <= most_rows
    asked = (
        (batch.overlap, limits.overlap, "overlap of scheduling and execution"),
        (cache.swap_space_bytes > 0, limits.host_tier, "the host-memory KV tier"),
        (cache.enable_prefix_caching, limits.block_sharing, "prefix caching"),
        (batch.enable_chunked_prefill, limits.mixed_batches, "prefill beside decode"),
        (batch.enable_chunked_prefill, limits.chunked_prefill, "chunked prefill"),
        (batch.max_num_seqs, fits_rows, f"more than {most_rows} sequences at once"),
    )
    return [
        f"turned off: {what}; device {device.name} does not offer it"
        for wanted, possible, what in asked
        if wanted and not possible
    ]


def _bucket_words(buckets: StepBuckets | None) -> str:
    if buckets is None:
        return ""
    return (
        f"steps are padded: {_numbers(buckets.prompt_rows)} prompts of "
        f"{_numbers(buckets.prompt_tokens)} tokens, or {_numbers(buckets.decode_rows)} decodes; "
        f"tables of {_numbers(buckets.table_blocks)} blocks"
    )


def _numbers(values: Sequence[int] | None) -> str:
    return ", ".join(map(str, values or ()))


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
