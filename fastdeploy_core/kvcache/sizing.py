"""How many KV blocks there will be; when they are too few, the message shows the arithmetic.

A bounded group of layers gets what max_num_seqs sequences can hold in it, which is known, and up to
as much again for cached prefixes, if there are any. The layers that need every token get the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy_core.config import BatchConfig, CacheConfig
from fastdeploy_core.contracts.model import Retention
from fastdeploy_core.errors import ResourceError
from fastdeploy_core.types.worker import LayerGroup, WorkerInfo

from .groups import GroupPlan

GIB, MIB = 2**30, 2**20
# Where the pool and everything else share the host's memory, half of what is free stays free.
SHARED_FRACTION = 0.5
# Of the pool's bytes, the most that prefixes in bounded groups get beside what sequences need.
PREFIX_FRACTION = 0.25
CHUNKS_IN_FLIGHT = 2  # of one prompt, with overlap


class CachePlan(NamedTuple):
    """Numbers of blocks per rank; all ranks have equally many."""

    num_blocks: int
    num_host_blocks: int
    report: list[str]
    bounded: tuple[GroupPlan, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """For Caches.allocate: first group, its host blocks, other groups, their host blocks."""
        device = [group.num_blocks for group in self.bounded]
        host = [group.num_host_blocks for group in self.bounded]
        return [self.num_blocks, self.num_host_blocks, *device, *host]


def pool_bytes(
    cache: CacheConfig, bytes_per_block: int, by_hand: int, measure: Callable[[], MemoryProfile]
) -> tuple[int, str]:
    """Bytes for the KV pool of a rank, and how they came about. by_hand: what the device says where
    it cannot be measured, or 0."""
    if cache.num_blocks_override is not None:
        size = cache.num_blocks_override * bytes_per_block
        return size, f"{cache.num_blocks_override} blocks as set by --num-gpu-blocks-override"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes, "as set by --kv-cache-memory-bytes"
    if by_hand:
        return by_hand, "as the device's plugin or its variable sets it"
    profile = measure()
    return profile.available_bytes, profile.arithmetic()


def plan_cache(
    workers: Sequence[WorkerInfo], cache: CacheConfig, batch: BatchConfig, max_model_len: int
) -> CachePlan:
    """Size the pool by the rank with the least memory; ResourceError says what would be enough."""
    tightest = min(workers, key=lambda w: _budget(w, cache) // max(1, w.bytes_per_block))
    block_size = tightest.block_size
    needed = -(-max_model_len // block_size)
    bounded, bounded_bytes = _plan_bounded(tightest, cache, batch, needed)
    left = _budget(tightest, cache) - bounded_bytes
    if cache.num_blocks_override is not None:
        num_blocks, origin = cache.num_blocks_override, "set by the operator"
    elif bounded and not tightest.bytes_per_block:  # no layer has these: numbers alone
        num_blocks = 2 * batch.max_num_seqs * needed if left >= 0 else 0
        origin = "which no layer has"
    else:
        num_blocks = left // max(1, tightest.bytes_per_block)
        origin = f"{left / MIB:.1f} MiB / {tightest.bytes_per_block / MIB:.4g} MiB per block"
    if num_blocks < 1 or (cache.num_blocks_override is None and num_blocks < needed):
        sizes = (max(0, num_blocks), needed, bounded_bytes)
        raise ResourceError(_too_small(tightest, cache, *sizes, max_model_len))
    report = [
        f"KV cache: {num_blocks} blocks of {block_size} tokens ({origin}) hold "
        f"{num_blocks * block_size} tokens, {num_blocks / needed:.2f} sequences of "
        f"{max_model_len} tokens; up to {batch.max_num_seqs} sequences run at once"
    ]
    report += [
        f"KV cache: {plan.num_blocks} blocks{f' of {block_size} tokens' * bool(group.tokens)} for "
        f"layers with a {_rule(group)} ({group.bytes_per_block} bytes each)"
        for plan, group in zip(bounded, tightest.bounded, strict=True)
    ]
    if num_blocks < needed:
        report.append(
            f"a sequence may have at most {num_blocks * block_size} tokens, since the pool is "
            f"smaller than max_model_len ({max_model_len})"
        )
    num_host_blocks, *more = [0] * (1 + len(bounded))
    if cache.swap_space_bytes:
        counts = [num_blocks, *(plan.num_blocks for plan in bounded)]
        num_host_blocks, *more = _host_blocks(tightest, len(workers), cache, counts, report)
    plans = (p._replace(num_host_blocks=n) for p, n in zip(bounded, more, strict=True))
    return CachePlan(num_blocks, num_host_blocks, report, tuple(plans))


def _plan_bounded(
    worker: WorkerInfo, cache: CacheConfig, batch: BatchConfig, longest: int
) -> tuple[tuple[GroupPlan, ...], int]:
    """The pools of bounded groups, and their bytes. longest: blocks of the longest sequence."""
    size, seqs, plans, needed_bytes = worker.block_size, batch.max_num_seqs, list[GroupPlan](), 0
    is_cached = cache.enable_prefix_caching and worker.block_sharing
    step = CHUNKS_IN_FLIGHT * -(-batch.max_num_batched_tokens // size)
    for group in worker.bounded:
        if group.kind == "state":  # a live one, and where it resumed, parted, and its prompt ended
            count, most = (2 * seqs + 2, min(longest, 4)) if is_cached else (seqs + 2, 1)
        else:
            # Between steps: tokens may begin and end within a block, and another one is begun.
            # While prompts run, their chunks beside it.
            held = min(longest, -(-group.tokens // size) + 2)
            most = min(longest, held + step + 1)
            count = min(seqs * longest, seqs * held + step + most)
        rule = Retention(group.kind, group.tokens)  # type: ignore[arg-type]
        plans.append(GroupPlan(rule, count, most))
        needed_bytes += count * group.bytes_per_block
    share = float(is_cached)
    if cache.num_blocks_override is None:
        budget = _budget(worker, cache)
        spare = budget - needed_bytes - longest * worker.bytes_per_block
        spare = max(0, min(spare, int(budget * PREFIX_FRACTION)))
        share = min(share, spare / max(1, needed_bytes))
    made = tuple(p._replace(num_blocks=int(p.num_blocks * (1 + share))) for p in plans)
    groups = zip(made, worker.bounded, strict=True)
    return made, sum(plan.num_blocks * group.bytes_per_block for plan, group in groups)


def _rule(group: LayerGroup) -> str:
    return group.kind + f" of {group.tokens} tokens" * bool(group.tokens)


def _budget(worker: WorkerInfo, cache: CacheConfig) -> int:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    return max(0, worker.available_bytes)


def _host_blocks(
    worker: WorkerInfo, num_ranks: int, cache: CacheConfig, counts: list[int], report: list[str]
) -> list[int]:
    """Of each group what a prefix needs at its end, and its share of `counts` on the device."""
    is_cached = cache.enable_prefix_caching and worker.block_sharing
    for applies, why in (
        (not worker.host_tier, "the device cannot move blocks to host memory"),
        (not is_cached, "it needs the prefix cache, which is off"),
    ):
        if applies:
            report.append(f"host KV tier off: {why}")
            return [0] * len(counts)
    sizes = [worker.bytes_per_block, *(group.bytes_per_block for group in worker.bounded)]
    needed = [1, *(max(1, -(-group.tokens // worker.block_size)) for group in worker.bounded)]
    least, total = (
        num_ranks * sum(n * size for n, size in zip(numbers, sizes, strict=True))
        for numbers in (needed, counts)
    )
    spare = cache.swap_space_bytes - least
    if spare < 0:
        raise ResourceError(
            f"the host KV tier cannot hold what one prefix needs at its end, {least} bytes: "
            f"{needed} block(s) of each group of layers on {num_ranks} rank(s); swap space is "
            f"{cache.swap_space_bytes} bytes; raise --swap-space or leave it at 0"
        )
    found = [m + n * spare // max(1, total) for m, n in zip(needed, counts, strict=True)]
    report.append(
        f"host KV tier: {found[0]} blocks"
        + "".join(
            f", {n} for layers with a {_rule(group)}"
            for n, group in zip(found[1:], worker.bounded, strict=True)
        )
        + f" ({cache.swap_space_bytes / MIB:.1f} MiB)"
    )
    return found


def _too_small(
    worker: WorkerInfo,
    cache: CacheConfig,
    num_blocks: int,
    needed: int,
    bounded_bytes: int,
    max_model_len: int,
) -> str:
    possible = num_blocks * worker.block_size
    if cache.num_blocks_override is not None:
        return (
            f"the KV cache needs at least one block, {cache.num_blocks_override} were asked for; "
            f"raise --num-gpu-blocks-override ({needed} hold one sequence of {max_model_len} "
            "tokens)"
        )
    source = "set" if cache.kv_cache_memory_bytes is not None else "left after weights and a step"
    text = (
        f"too little memory for the KV cache: one sequence of {max_model_len} tokens needs "
        f"{needed} blocks of {worker.block_size} tokens = {needed} x {worker.bytes_per_block} = "
        f"{needed * worker.bytes_per_block} bytes; {_budget(worker, cache)} bytes are {source}, "
        f"enough for {num_blocks} blocks"
    )
    if cache.kv_cache_memory_bytes is None and worker.memory_arithmetic:
        text += f" ({worker.memory_arithmetic})"
    if bounded_bytes:
        kinds = " and ".join(map(_rule, worker.bounded))
        text += (
            f"; of them layers with a {kinds} take {bounded_bytes} for all sequences; lower "
            "--max-num-seqs or --max-num-batched-tokens"
        )
    lower = f"lower --max-model-len to {possible}, or " * bool(possible)
    return f"{text}; {lower}give it more memory"


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one rank. `step_bytes`: what a step of maximal size needs beside weights and cache;
    `graph_bytes`: what captured graphs hold."""

    total_bytes: int
    free_bytes: int  # with the weights loaded, between steps
    weight_bytes: int
    step_bytes: int
    utilization: float
    is_bound: bool = False  # step_bytes is an upper bound, not a measurement
    # ranks of all engines that share this memory with the whole host; 0: device memory
    shared_with: int = 0
    graph_bytes: int = 0
    most_bytes: int = 0  # all that the batch could ever hold; what is shared gives no more
    others_bytes: int = 0  # in use before this rank began, on a device with room for both

    @property
    def available_bytes(self) -> int:
        """What is left for the KV pool; may be negative."""
        used = self.total_bytes - self.free_bytes - self.others_bytes
        left = int(self.total_bytes * self.utilization) - used - self.step_bytes - self.graph_bytes
        if self.shared_with:
            left = min(left, int(self.free_bytes * SHARED_FRACTION)) // self.shared_with
            left = min(left, self.most_bytes)
        return left

    def arithmetic(self) -> str:
        """For messages: where the bytes go."""
        used = self.total_bytes - self.free_bytes - self.others_bytes
        text = (
            f"{self.total_bytes / GIB:.2f} GiB x {self.utilization:g} usable"
            f" - {used / GIB:.2f} GiB in use (weights {_size(self.weight_bytes)})"
            f" - {self.step_bytes / GIB:.2f} GiB{' at most' * self.is_bound} for the largest step"
        )
        if self.graph_bytes:
            text += f" - {self.graph_bytes / GIB:.2f} GiB for captured decode steps"
        if self.shared_with:
            text += (
                f", at most {SHARED_FRACTION:g} of {self.free_bytes / GIB:.2f} GiB free host memory"
                f" for {self.shared_with} rank(s), and {self.most_bytes / GIB:.2f} GiB hold a full"
                " batch"
            )
        return f"{text} = {self.available_bytes / GIB:.2f} GiB for the KV cache"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
