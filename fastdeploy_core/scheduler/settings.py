"""What the batch scheduler must respect, from the configuration and from what the device can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fastdeploy_core.config import BatchConfig, EngineConfig
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types.worker import WorkerInfo

# Share of max_model_len above which a prompt counts as long, when prompts may overtake each other
# and no threshold is given (FastDeploy's and vLLM's default).
LONG_PREFILL_SHARE = 0.04
# Decodes after prompts before steps that are queued ahead decode several times.
BEFORE_SEVERAL = 16
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Fixed for the life of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    max_encode_tokens: int = 0  # vectors of pictures in a step, but one picture at least
    policy: Literal["fcfs", "priority"] = "fcfs"
    block_sharing: bool = True
    mixed_batches: bool = True
    max_prefills_per_step: int | None = None
    # Speculation: most drafts of a row, 0 without; see config.SpeculativeConfig and
    # contracts.Requirements.
    num_speculative_tokens: int = 0
    adaptive_length: bool = True
    disable_by_batch_size: int = 0
    lookahead_tokens: int = 0
    captures_drafts: bool = False  # see WorkerInfo
    captures_drafting: bool = False
    max_decodes: int = 1  # of each row in a step; see WorkerInfo
    max_drafted_decodes: int = 1
    decodes_before_several: int = 0  # after prompts
    on_host: bool = False  # see WorkerInfo
    seed: int = 0

    @property
    def draft_numbers(self) -> tuple[int, ...]:
        """Numbers of drafts to choose from; empty: any. Captured graphs are of one of these."""
        return tuple({1, self.num_speculative_tokens}) if self.captures_drafts else ()


def make_settings(
    config: EngineConfig, info: WorkerInfo, needs: Requirements | None = None
) -> SchedulerSettings:
    """Combine what is wanted with what the device can do; ConfigError where that is impossible.
    `needs`: of the speculative method."""
    needs, speculative = needs or Requirements(), config.speculative
    batch = _within(config.batch, info)
    max_model_len = config.model.max_model_len
    _check(batch, max_model_len)
    threshold = batch.long_prefill_token_threshold if batch.enable_chunked_prefill else 0
    if not threshold and batch.enable_chunked_prefill and batch.max_num_partial_prefills > 1:
        threshold = max(1, int(LONG_PREFILL_SHARE * max_model_len))
    return SchedulerSettings(
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=batch.enable_chunked_prefill,
        max_num_partial_prefills=batch.max_num_partial_prefills,
        max_long_partial_prefills=batch.max_long_partial_prefills,
        long_prefill_token_threshold=threshold,
        # Without chunks a prompt's pictures come in one step.
        max_encode_tokens=(config.media.max_encode_tokens or batch.max_num_batched_tokens // 4)
        if batch.enable_chunked_prefill
        else NO_LIMIT,
        policy=batch.policy,
        block_sharing=info.block_sharing,
        mixed_batches=info.mixed_batches,
        max_prefills_per_step=info.max_prefills_per_step,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        adaptive_length=speculative is None or speculative.adaptive_length,
        disable_by_batch_size=speculative.disable_by_batch_size if speculative else 0,
        lookahead_tokens=needs.lookahead_tokens,
        captures_drafts=info.captures_drafts,
        captures_drafting=info.captures_drafting,
        max_decodes=info.max_decodes,
        max_drafted_decodes=info.max_drafted_decodes,
        decodes_before_several=BEFORE_SEVERAL if batch.overlap and info.overlap else 0,
        on_host=info.on_host,
        seed=config.model.seed,
    )


def _within(batch: BatchConfig, info: WorkerInfo) -> BatchConfig:
    """What was asked for, cut to what the device takes in one step."""
    tokens, rows = batch.max_num_batched_tokens, batch.max_num_seqs
    return replace(
        batch,
        max_num_batched_tokens=min(tokens, info.max_step_tokens or tokens),
        max_num_seqs=min(rows, info.max_step_rows or rows),
        enable_chunked_prefill=batch.enable_chunked_prefill and info.chunked_prefill,
    )


def _check(batch: BatchConfig, max_model_len: int) -> None:
    if batch.max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {batch.max_num_seqs}")
    if batch.max_num_batched_tokens < batch.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({batch.max_num_batched_tokens}) is smaller than max_num_seqs "
            f"({batch.max_num_seqs}); every running sequence needs one token of each step"
        )
    if not batch.enable_chunked_prefill and batch.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt runs in one step, and max_num_batched_tokens "
            f"({batch.max_num_batched_tokens}) is smaller than max_model_len ({max_model_len}); "
            "raise the former, lower the latter, or enable chunked prefill where the device can do "
            "it"
        )
    if not 1 <= batch.max_long_partial_prefills <= batch.max_num_partial_prefills:
        raise ConfigError(
            f"max_long_partial_prefills ({batch.max_long_partial_prefills}) must be between 1 and "
            f"max_num_partial_prefills ({batch.max_num_partial_prefills})"
        )
