"""The batch scheduler's settings, from the configuration and from what the device can do."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_core.config import BatchConfig, EngineConfig
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.scheduler.settings import NO_LIMIT, SchedulerSettings
from fastdeploy_core.types.worker import WorkerInfo

# Share of max_model_len above which a prompt counts as long, when prompts may overtake each other
# and no threshold is given (FastDeploy's and vLLM's default).
LONG_PREFILL_SHARE = 0.04


def make_settings(
    config: EngineConfig, info: WorkerInfo, needs: Requirements | None = None
) -> SchedulerSettings:
    """Combine what is wanted with what the device can do; ConfigError where that is impossible.
    `needs`: of the speculative method."""
    batch = _within(config.batch, info)
    max_model_len = config.model.max_model_len
    _check(batch, max_model_len)
    threshold = batch.long_prefill_token_threshold if batch.enable_chunked_prefill else 0
    if not threshold and batch.enable_chunked_prefill and batch.max_num_partial_prefills > 1:
        threshold = max(1, int(LONG_PREFILL_SHARE * max_model_len))
    return SchedulerSettings(
        max_model_len,
        replace(batch, long_prefill_token_threshold=threshold),
        info,
        config.speculative,
        lookahead_tokens=0 if needs is None else needs.lookahead_tokens,
        # Without chunks a prompt's pictures come in one step.
        max_encode_tokens=(config.media.max_encode_tokens or batch.max_num_batched_tokens)
        if batch.enable_chunked_prefill
        else NO_LIMIT,
        seed=config.model.seed,
        max_adapters=0 if config.lora is None else config.lora.max_loras,
    )


def _within(batch: BatchConfig, info: WorkerInfo) -> BatchConfig:
    """What was asked for, cut to what the device takes in one step."""
    tokens, rows = batch.max_num_batched_tokens, batch.max_num_seqs
    return replace(
        batch,
        max_num_batched_tokens=min(tokens, info.max_step_tokens or tokens),
        max_num_seqs=min(rows, info.max_step_rows or rows),
        enable_chunked_prefill=batch.enable_chunked_prefill and info.chunked_prefill,
        overlap=batch.overlap and info.overlap,
    )


def _check(batch: BatchConfig, max_model_len: int) -> None:
    """What only the device's limits may have made impossible; the rest was checked as arguments."""
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
