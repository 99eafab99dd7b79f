"""How many KV blocks there will be; when they are too few, the message shows the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_core.config import BatchConfig, CacheConfig
from fastdeploy_core.errors import ResourceError
from fastdeploy_core.types.worker import WorkerInfo

MIB = 1024 * 1024


class CachePlan(NamedTuple):
    """Numbers of blocks per rank; all ranks have equally many."""

    num_blocks: int
    num_host_blocks: int
    report: list[str]


def plan_cache(
    workers: Sequence[WorkerInfo], cache: CacheConfig, batch: BatchConfig, max_model_len: int
) -> CachePlan:
    """Size the pool by the rank with the least memory; ResourceError says what would be enough."""
    tightest = min(workers, key=lambda w: _budget(w, cache) // max(1, w.bytes_per_block))
    block_size = tightest.block_size
    needed = -(-max_model_len // block_size)
    if cache.num_blocks_override is not None:
        num_blocks, origin = cache.num_blocks_override, "set by the operator"
    else:
        num_blocks = _budget(tightest, cache) // max(1, tightest.bytes_per_block)
        origin = (
            f"{_budget(tightest, cache) / MIB:.1f} MiB / "
            f"{tightest.bytes_per_block / MIB:.4g} MiB per block"
        )
    if num_blocks < 1 or (cache.num_blocks_override is None and num_blocks < needed):
        raise ResourceError(_too_small(tightest, cache, num_blocks, needed, max_model_len))
    report = [
        f"KV cache: {num_blocks} blocks of {block_size} tokens ({origin}) hold "
        f"{num_blocks * block_size} tokens, {num_blocks / needed:.2f} sequences of "
        f"{max_model_len} tokens; up to {batch.max_num_seqs} sequences run at once"
    ]
    if num_blocks < needed:
        report.append(
            f"a sequence may have at most {num_blocks * block_size} tokens, since the pool is "
            f"smaller than max_model_len ({max_model_len})"
        )
    num_host_blocks = 0
    if cache.swap_space_bytes:
        num_host_blocks = _host_blocks(tightest, len(workers), cache, report)
    return CachePlan(num_blocks, num_host_blocks, report)


def _budget(worker: WorkerInfo, cache: CacheConfig) -> int:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    return max(0, worker.available_bytes)


def _host_blocks(worker: WorkerInfo, num_ranks: int, cache: CacheConfig, report: list[str]) -> int:
    if not worker.host_tier:
        report.append("host KV tier off: the device cannot move blocks to host memory")
        return 0
    if not (cache.enable_prefix_caching and worker.block_sharing):
        report.append("host KV tier off: it needs the prefix cache, which is off")
        return 0
    block_bytes = max(1, worker.bytes_per_block * num_ranks)
    num_host_blocks = cache.swap_space_bytes // block_bytes
    if num_host_blocks < 1:
        raise ResourceError(
            f"the host KV tier cannot hold one block: swap space is {cache.swap_space_bytes} "
            "bytes, "
            f"a block has {block_bytes} on {num_ranks} rank(s); raise --swap-space or leave it at 0"
        )
    report.append(
        f"host KV tier: {num_host_blocks} blocks ({cache.swap_space_bytes / MIB:.1f} MiB)"
    )
    return num_host_blocks


def _too_small(
    worker: WorkerInfo, cache: CacheConfig, num_blocks: int, needed: int, max_model_len: int
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
    if possible:
        return f"{text}; lower --max-model-len to {possible}, or give it more memory"
    return f"{text}; give it more memory"
