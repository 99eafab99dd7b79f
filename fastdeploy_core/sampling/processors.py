"""Pluggable logits processors: which sequence has one, calling them, and the core's own.

A processor that raises fails the sequences it was working on and no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core import plugins
from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.small import LogitsProcessor, ProcessorContext
from fastdeploy_core.errors import FastDeployError, InvalidRequest, PluginError, PluginLoadError
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.types import NewSequence, SamplingParams
from fastdeploy_core.types.sampling import MAX_LOGIT_BIAS

from .columns import PROCESSOR, SamplingColumns, SamplingPlan
from .masks import Histories, note_failure

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

FAILED = "logits_processor_failed"
BUDGET = "ThinkingBudgetLogitsProcessor"  # of fd-parsers; made for the first request that asks
BUDGET_ARGS = {"thinking_budget", "think_stop_sentence"}
ProcessorDriver = Callable[[ProcessorContext], LogitsProcessor]


@dataclass(slots=True)
class _Member:
    name: str
    processor: LogitsProcessor
    seq_ids: dict[int, int] = field(default_factory=dict)  # slot to seq_id


class ProcessorSet:
    """All processors of a worker, in order of declaration, and which slots each one serves."""

    def __init__(
        self,
        device: DeviceBackend,
        columns: SamplingColumns,
        context: ProcessorContext,
        members: Sequence[_Member] = (),
    ) -> None:
        self._device, self._columns, self._context = device, columns, context
        self._members = list(members)

    def add(self, slot: int, seq_id: int, params: SamplingParams, prompt: np.ndarray) -> None:
        """Offer a sequence to every processor; InvalidRequest if its arguments are wrong."""
        named = BUDGET_ARGS & (params.logits_processors_args or {}).keys()
        is_limited = params.thinking_token_budget is not None or named
        if is_limited and all(member.name != BUDGET for member in self._members):
            try:
                driver = part("thinking-budget", "thinking_token_budget")
            except PluginError as error:
                raise InvalidRequest(str(error), param="thinking_token_budget") from None
            self._members.append(_Member(BUDGET, driver(self._context)))
        taken: set[str] | None = set()
        for member in self._members:
            keys = getattr(member.processor, "arguments", None)  # None: it may take any
            taken = None if keys is None or taken is None else taken.union(keys)
        unknown = (params.logits_processors_args or {}).keys() - (taken or ())
        if taken is not None and unknown:
            raise InvalidRequest(
                f"no loaded logits processor takes logits_processors_args.{min(unknown)}; "
                f"they take: {', '.join(sorted(taken)) or 'nothing'}; see --logits-processors",
                param="logits_processors_args",
            )
        for member in self._members:
            member.processor.validate(params)
            if member.processor.add(seq_id, params, prompt):
                member.seq_ids[slot] = seq_id
                self._columns.set_flag(slot, PROCESSOR)

    def reset(self, slot: int) -> None:
        """The slot's sequence is gone."""
        for member in self._members:
            seq_id = member.seq_ids.pop(slot, None)
            if seq_id is not None:
                try:
                    member.processor.remove(seq_id)
                except BaseException as error:
                    note_failure(error, f"logits processor {member.name} failed in remove()")

    def apply(
        self, logits: Tensor, plan: SamplingPlan, histories: Histories, errors: dict[int, str]
    ) -> Tensor:
        """Run every processor on its rows; failures are written into `errors` by row."""
        xp, slots = self._device.xp, plan.slots.tolist()
        candidates = plan.rows(PROCESSOR).tolist()
        for member in self._members:
            rows = [row for row in candidates if slots[row] in member.seq_ids]
            if not rows:
                continue
            every = len(rows) == plan.num_rows
            index = None if every else self._device.to_device(np.asarray(rows, dtype=np.int64))
            own = logits if every else xp.index_select(logits, 0, index)
            seq_ids = [member.seq_ids[slots[row]] for row in rows]
            try:
                made = member.processor.apply(own, seq_ids, [histories(row) for row in rows])
                if made.shape != own.shape:
                    raise ValueError(f"it returned shape {made.shape} for rows of {own.shape}")
            except BaseException as error:
                note_failure(error, f"logits processor {member.name} failed in apply()")
                errors.update((row, FAILED) for row in rows)
                continue
            if every:
                logits = made
            else:
                xp.index_copy_(logits, 0, index, made)
        return logits


def load_processors(
    names: Sequence[str], context: ProcessorContext, device: DeviceBackend, columns: SamplingColumns
) -> ProcessorSet:
    """The configured processors."""
    members, seen = [], set()
    for name in names:
        driver = find_processor(name)
        if driver in seen:
            continue
        seen.add(driver)
        try:
            members.append(_Member(name, driver(context)))
        except FastDeployError:
            raise
        except Exception as error:
            raise PluginLoadError(
                f"logits processor {name!r} cannot be constructed: {type(error).__name__}: {error}"
            ) from error
    return ProcessorSet(device, columns, context, members)


def find_processor(name: str) -> ProcessorDriver:
    """A processor class by entry-point name, or by "module:Class" as the operator wrote it."""
    if name in BUILTIN_PROCESSORS:
        return BUILTIN_PROCESSORS[name]
    if ":" not in name:
        found: ProcessorDriver = plugins.lookup("logits_processor", name)
        return found
    module, _, attribute = name.partition(":")
    try:
        named: ProcessorDriver = getattr(importlib.import_module(module), attribute)
        return named
    except (ImportError, AttributeError) as error:
        raise PluginLoadError(
            f"logits processor {name!r} cannot be imported: {error}; --logits-processors takes "
            f"module:Class or one of: {', '.join(sorted(BUILTIN_PROCESSORS))}"
        ) from error


class LogitBiasLogitsProcessor:
    """logits_processors_args={"logit_bias": {token id: bias}}, as FastDeploy spells logit_bias."""

    arguments = frozenset({"logit_bias"})

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def validate(self, params: SamplingParams) -> None:
        """Token ids within the vocabulary, finite numbers."""
        self._read(params)

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """Takes only sequences that gave the argument."""
        bias = self._read(params)
        if bias is None:
            return False
        self._bias[seq_id] = bias
        return True

    def remove(self, seq_id: int) -> None:
        """Forget its numbers."""
        self._bias.pop(seq_id, None)

    def apply(
        self, logits: Tensor, seq_ids: Sequence[int], output_token_ids: Sequence[np.ndarray]
    ) -> Tensor:
        """Add each sequence's bias."""
        xp, vocab_size = self._context.xp, self._context.vocab_size
        entries = [self._bias[seq_id] for seq_id in seq_ids]
        where = np.concatenate([ids + row * vocab_size for row, (ids, _) in enumerate(entries)])
        what = np.concatenate([values for _, values in entries])
        device = self._context.device
        xp.index_add_(
            logits.view(-1),
            0,
            xp.to_device(xp.from_numpy(where), device),
            xp.to_device(xp.from_numpy(what), device),
        )
        return logits

    def _read(self, params: SamplingParams) -> tuple[np.ndarray, np.ndarray] | None:
        given = (params.logits_processors_args or {}).get("logit_bias")
        if given is None:
            return None
        if not isinstance(given, Mapping) or len(given) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logits_processors_args.logit_bias must be a map of at most {MAX_LOGIT_BIAS} "
                "entries",
                param="logits_processors_args",
            )
        try:
            ids = np.asarray([int(token) for token in given], dtype=np.int64)
            values = np.asarray([float(given[token]) for token in given], dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            ids, values = np.asarray([-1]), np.asarray([0.0], dtype=np.float32)
        if ids.size == 0:
            return None
        if ids.min() < 0 or ids.max() >= self._context.vocab_size or not np.isfinite(values).all():
            raise InvalidRequest(
                "logits_processors_args.logit_bias maps token ids (0 to "
                f"{self._context.vocab_size - 1}) to finite numbers",
                param="logits_processors_args",
            )
        return ids, values


# These only take part in requests that give them arguments.
BUILTIN_PROCESSORS: dict[str, ProcessorDriver] = {
    "LogitBiasLogitsProcessor": LogitBiasLogitsProcessor
}


def has_processors(config: EngineConfig) -> bool:
    """Whether there are logits processors of plugins, which may look at any text."""
    return any(name not in BUILTIN_PROCESSORS for name in config.logits_processors)


def is_simple(new: NewSequence, config: EngineConfig) -> bool:
    """Whether a sequence wants its likeliest tokens only, by what every rank knows of it."""
    params = new.sampling
    return (
        params.is_greedy
        and params.is_unconstrained
        and params.logprobs is None
        and new.grammar is None
        and not has_processors(config)
    )
