"""Sampling parameters of every slot as numpy columns, and the plan of a batch made from them.

A plan is kept while the same slots sample in the same order, so a steady decode step uploads no
parameters and examines no row. With drafts a slot has several consecutive rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

# What a row needs; the sampler skips every stage whose bit no row of the batch has.
RANDOM = 1
TEMPERATURE = 2
FILTER = 4
PENALTY = 8
BIAS = 16
MASK = 32  # allowed ids or single-token bad words: a mask that never changes
MIN_TOKENS = 64
BAD_WORDS = 128  # of several tokens
GRAMMAR = 256
PROCESSOR = 512
LOGPROBS = 1024
PROMPT_LOGPROBS = 2048
# Stages that read generated tokens on the host: the results of the previous step must have arrived
# there.
HOST = BAD_WORDS | GRAMMAR | PROCESSOR
# Stages that may forbid every token.
FORBIDS = MASK | MIN_TOKENS | BAD_WORDS | GRAMMAR | PROCESSOR | BIAS

NO_LOGPROBS = -2  # -1 means the whole vocabulary


class SamplingColumns:
    """One entry per slot in every column. `version` changes with every write."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.version = 0
        self.flags = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.bias: list[tuple[np.ndarray, np.ndarray] | None] = [None] * max_num_seqs
        self.named: list[list[int]] = [[]] * max_num_seqs  # logprob_token_ids

    def add(self, slot: int, params: SamplingParams, seed: int) -> None:
        """Fill one slot's entries; the owners of masks, grammars and processors set their bits."""
        flags = 0
        if not params.is_greedy:
            flags |= RANDOM
            if params.temperature != 1.0:
                flags |= TEMPERATURE
            if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= FILTER
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            flags |= PENALTY
        if params.logit_bias:
            flags |= BIAS
            self.bias[slot] = (
                np.fromiter(params.logit_bias.keys(), dtype=np.int64),
                np.fromiter(params.logit_bias.values(), dtype=np.float32),
            )
        if params.min_tokens > 0:
            flags |= MIN_TOKENS
        if params.logprobs is not None:
            flags |= LOGPROBS
            named = self.named[slot] = params.logprob_token_ids or []
            self.num_logprobs[slot] = len(named) or params.logprobs
        if params.prompt_logprobs is not None:
            flags |= PROMPT_LOGPROBS
            self.num_prompt_logprobs[slot] = params.prompt_logprobs
        self.flags[slot] = flags
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = (seed + 2**63) % 2**64 - 2**63  # the int64 of the same bits
        self.min_tokens[slot] = params.min_tokens
        self.version += 1

    def set_flag(self, slot: int, flag: int) -> None:
        """Set a bit of this slot, for another owner."""
        self.flags[slot] |= flag
        self.version += 1

    def reset(self, slot: int) -> None:
        """Reset to the entries of an unused slot."""
        self.flags[slot] = 0
        self.temperature[slot] = self.top_p[slot] = self.repetition[slot] = 1.0
        self.top_k[slot] = self.seed[slot] = self.min_tokens[slot] = 0
        self.min_p[slot] = self.presence[slot] = self.frequency[slot] = 0.0
        self.num_logprobs[slot] = self.num_prompt_logprobs[slot] = NO_LOGPROBS
        self.bias[slot], self.named[slot] = None, []
        self.version += 1


class SamplingPlan:
    """Everything about a batch of sampling rows that stays the same while its rows do.

    `*_rows` are row numbers on the device; None means all rows.
    """

    def __init__(self, columns: SamplingColumns, slots: np.ndarray, device: DeviceBackend) -> None:
        self.slots = slots
        self.version = columns.version
        self.row_flags = columns.flags[slots]
        self.flags = int(np.bitwise_or.reduce(self.row_flags)) if slots.size else 0
        self.num_rows = int(slots.size)
        # needs the likeliest token and nothing else
        self.is_plain = not self.flags & ~PROMPT_LOGPROBS
        self._depths: np.ndarray | None = None
        self.min_tokens = columns.min_tokens[slots]
        self.num_logprobs = columns.num_logprobs[slots]
        self._columns = columns
        self._device = device
        self._parts: dict[str, Any] = {}

    @property
    def slots_dev(self) -> Tensor:
        """[rows] int64; captured graphs do not use it."""
        return self._uploaded("slots", lambda: self.slots)

    def matches(self, columns: SamplingColumns, slots: np.ndarray) -> bool:
        """Whether this plan still describes these rows."""
        if self.version != columns.version:
            return False
        if slots is not self.slots:
            if not np.array_equal(slots, self.slots):
                return False
            self.slots = slots
        return True

    @property
    def depths(self) -> np.ndarray:
        """[rows] rows of the same slot before each row: the drafts before its position."""
        if self._depths is None:
            slots, rows = self.slots, np.arange(self.num_rows)
            begins = np.ones(self.num_rows, dtype=bool)
            begins[1:] = slots[1:] != slots[:-1]
            self._depths = rows - np.maximum.accumulate(np.where(begins, rows, 0))
        return self._depths

    def pairs_dev(self, flag: int) -> tuple[Tensor, Tensor]:
        """For every draft before every row with the flag: (the row's index among rows with the
        flag, times the vocabulary size; the number of the row that holds the draft)."""
        key = f"pairs{flag}"
        if key not in self._parts:
            rows = self.rows(flag)
            depths = self.depths[rows]
            nth = np.repeat(np.arange(rows.size), depths)
            offset = np.arange(nth.size) - np.repeat(np.cumsum(depths) - depths, depths)
            holders = rows[nth] - depths[nth] + offset
            base = nth * self._columns.vocab_size
            self._parts[key] = (self._to_device(base), self._to_device(holders))
        pairs: tuple[Tensor, Tensor] = self._parts[key]
        return pairs

    def rows(self, flag: int) -> np.ndarray:
        """Numbers of the rows that have the flag."""
        return np.flatnonzero(self.row_flags & flag)

    def named(self, rows: np.ndarray) -> list[list[int]]:
        """Of each of these rows, the tokens that it names for log-probabilities."""
        return [self._columns.named[slot] for slot in self.slots[rows].tolist()]

    def rows_dev(self, flag: int) -> Tensor | None:
        """`rows` on the device; None when every row has the flag."""
        key = f"rows{flag}"
        if key not in self._parts:
            rows = self.rows(flag)
            self._parts[key] = None if rows.size == self.num_rows else self._to_device(rows)
        return self._parts[key]

    def column(self, name: str, flag: int) -> Tensor:
        """A parameter column on the device, of the rows that have the flag."""
        column: np.ndarray = getattr(self._columns, name)
        return self._uploaded(f"{name}{flag}", lambda: column[self.slots[self.rows(flag)]])

    def is_random_dev(self) -> Tensor:
        """[rows] bool on the device: rows that sample at random."""
        return self._uploaded("is_random", lambda: (self.row_flags & RANDOM) != 0)

    def slots_with(self, flag: int) -> Tensor:
        """Slots of the rows that have the flag, on the device."""
        return self._uploaded(f"slots{flag}", lambda: self.slots[self.rows(flag)])

    def first_flat(self, flag: int) -> Tensor:
        """slot * vocabulary size of the rows that have the flag, on the device."""
        size = self._columns.vocab_size
        return self._uploaded(f"flat{flag}", lambda: self.slots[self.rows(flag)] * size)

    def filter_rows_dev(self) -> Tensor | None:
        """Which of the RANDOM rows are filtered; None when all of them are."""
        if "filtered" not in self._parts:
            random, filtered = self.rows(RANDOM), self.rows(FILTER)
            rows = np.searchsorted(random, filtered)
            same = rows.size == random.size
            self._parts["filtered"] = None if same else self._to_device(rows)
        return self._parts["filtered"]

    def bias(self) -> tuple[Tensor, Tensor]:
        """Flat positions in [rows, vocabulary] and what to add there."""
        if "bias" not in self._parts:
            vocab_size = self._columns.vocab_size
            where, what = [], []
            for row in self.rows(BIAS):
                entry = self._columns.bias[self.slots[row]]
                if entry is not None:
                    where.append(entry[0] + row * vocab_size)
                    what.append(entry[1])
            self._parts["bias"] = (
                self._to_device(np.concatenate(where)),
                self._to_device(np.concatenate(what)),
            )
        bias: tuple[Tensor, Tensor] = self._parts["bias"]
        return bias

    def _uploaded(self, key: str, make: Callable[[], np.ndarray]) -> Tensor:
        """What `make` returns, on the device; made once."""
        if key not in self._parts:
            self._parts[key] = self._to_device(make())
        return self._parts[key]

    def _to_device(self, array: np.ndarray) -> Tensor:
        return self._device.to_device(np.ascontiguousarray(array))
