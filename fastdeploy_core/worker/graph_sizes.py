"""Which steps are captured: batch sizes of decode steps, numbers of tokens with prompts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.attention import AttentionBackend, AttentionSpec, StateSpec
    from fastdeploy_core.contracts.device import DeviceLimits
    from fastdeploy_core.layers.experts import ExpertRanks

MAX_CAPTURED_ROWS = 512
# Beyond, a step keeps an accelerator busy for longer than any host needs to queue it.
MOST_TOKENS = 16384
_LADDER = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120,
           6144, 8192, 10240, 12288, 14336, 16384)  # fmt: skip


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture when none are given, FastDeploy's: steps of 8 up to 128, of 16 up to
    256, of 32 above, and the largest batch itself."""
    most = min(max_num_seqs, MAX_CAPTURED_ROWS)
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 1025, 32)]
    return (*(size for size in steps if size < most), most)


def graph_sizes(
    config: EngineConfig,
    limits: DeviceLimits,
    drivers: Iterable[AttentionBackend],
    num_ranks: int,
    *,
    can_sample: bool = True,
    specs: Iterable[AttentionSpec | StateSpec] = (),
) -> tuple[tuple[int, ...], str]:
    """Batch sizes to capture, none if the device cannot or shall not, and a line for the report.
    can_sample: whether sampling at random can be captured. specs: of layers."""
    drivers, length = list(drivers), config.model.max_model_len
    varies = limits.graph_any_size or config.speculative is not None
    unable = [driver.name for driver in drivers if not driver.can_capture_decode]
    longest = min((getattr(d, "max_recorded_len", math.inf) for d in drivers), default=math.inf)
    has_offsets = any("offsets" in spec.needs for spec in specs)
    obstacles = (
        (not config.graphs.enabled, "as asked"),
        (not limits.graph_capture, "the device captures no graphs"),
        (bool(unable), f"attention driver {unable[0] if unable else ''} cannot be captured"),
        (has_offsets and limits.graph_any_size, "no kernel of it adds offsets to positions"),
        (length > longest, f"sequences of {length} tokens are too long for it here"),
        (num_ranks > 1 and not limits.graph_collectives, "the device's collectives cannot"),
        (config.parallel.shares_experts and varies, "engines that share experts have unlike steps"),
        (config.speculative and not can_sample, "the reference waits where drafts are sampled"),
    )
    for applies, why in obstacles:
        if applies:
            return (), f"captured decode steps: none, {why}"
    most = min(config.batch.max_num_seqs, config.graphs.max_size or config.batch.max_num_seqs)
    usual = (most,) if limits.graph_any_size else ladder(most)
    buckets = limits.step_buckets.decode_rows if limits.step_buckets else None
    wanted = config.graphs.sizes or buckets or usual
    sizes = tuple(size for size in wanted if size <= most)
    if not sizes:
        return (), f"captured decode steps: none, no size up to {most} is among {list(wanted)}"
    if limits.graph_any_size:
        return sizes, f"captured decode steps: up to {sizes[-1]} rows"
    return sizes, f"captured decode steps: {len(sizes)} sizes, {sizes[0]} to {sizes[-1]} rows"


def unlike(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes for which kernels may be specialized differently: powers of two, the first that is
    none, and the largest."""
    powers = [size for size in sizes if size & (size - 1) == 0]
    return tuple(sorted({*powers, *[s for s in sizes if s not in powers][:1], max(sizes)}))


def prompt_ladder(max_step_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, the largest step among them."""
    most = min(max_step_tokens, MOST_TOKENS)
    return (*(size for size in _LADDER if size < most), most)


def prompt_sizes(
    config: EngineConfig,
    limits: DeviceLimits,
    drivers: Iterable[AttentionBackend],
    ranks: ExpertRanks | None = None,
) -> tuple[int, ...]:
    """The ladder if every attention driver can be captured in such steps, as far as divided experts
    can; the largest step alone where it serves any size."""
    if not all(driver.can_capture_mixed for driver in drivers):
        return ()
    sizes = prompt_ladder(config.batch.max_num_batched_tokens)
    if limits.graph_any_size:
        return sizes[-1:]
    most = None if ranks is None else ranks.most_recorded
    return sizes if most is None else tuple(size for size in sizes if size <= most)
