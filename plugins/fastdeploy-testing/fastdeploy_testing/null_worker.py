"""The worker of the fake devices: a language model that is a hash, over a KV cache of numbers.

It keeps a cache and reads every block through the block tables, so a wrong block, a missing copy or
a stale position changes the tokens. Tests predict tokens with `NullModel.expected`.
"""

from __future__ import annotations

import mmap
import time
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.types import (
    BatchRows,
    ModelRunnerOutput,
    NewSequence,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from fastdeploy_core.types.worker import WorkerInfo

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolved import ResolvedPlugins

SLOW_STEP_S = 0.1
_MASK = 2**64 - 1
_EMPTY = 0  # content of an unwritten slot
_FIRST = 0x243F6A8885A308D3  # stands before the first token


def _mix(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    value ^= value >> 29
    value = (value * 0xBF58476D1CE4E5B9) & _MASK
    return value ^ (value >> 32)


class NullOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section "null" of config.json: properties of the fake device and model."""

    vocab_size: int = 256
    step_s: float = 0.0  # how long a step takes
    slow_file: str = ""  # in the model's folder: while it is there, a step takes SLOW_STEP_S
    num_blocks: int = 1024  # what its memory holds
    block_size: int = 0  # 0: the configuration's
    block_sharing: bool = True
    mixed_batches: bool = True
    max_prefills_per_step: int | None = None
    chunked_prefill: bool = True
    max_step_tokens: int | None = None
    max_step_rows: int | None = None
    overlap: bool = True
    asynchronous: bool = True  # a launch queues the step; False: a launch does the step
    host_tier: bool = True
    logprobs: bool = True
    # False: tokens are arbitrary numbers and nothing is cached, so a step costs the host nothing.
    predictable: bool = True
    decodes_per_step: int = 1  # see DeviceLimits; without overlap and speculation
    draft_accuracy: float = 0.6  # share of accepted drafts, if speculation is configured


class NullModel:
    """The fake language model: the next token is a fixed hash of all tokens before it."""

    def __init__(self, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size

    @staticmethod
    def state(before: int, token: int) -> int:
        """The cache entry of a token: a number that depends on the whole prefix."""
        return _mix(before ^ (token + 1)) | 1

    def next_token(self, states: array[int], sampling: SamplingParams, seed: int) -> int:
        """The token after these cached states; with a temperature it also depends on the seed."""
        value = zlib.crc32(states.tobytes())
        if not sampling.is_greedy:
            value ^= _mix(seed ^ len(states))
        return _mix(value) % self.vocab_size

    def expected(
        self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams, seed: int = 0
    ) -> list[int]:
        """The num_tokens tokens that follow the prompt, independent of other sequences; stops are
        ignored."""
        states: array[int] = array("Q")
        for token in prompt:
            states.append(self.state(states[-1] if states else _FIRST, token))
        tokens: list[int] = []
        for _ in range(num_tokens):
            tokens.append(self.next_token(states, sampling, seed))
            states.append(self.state(states[-1], tokens[-1]))
        return tokens


class _State:
    """A sequence as the worker remembers it."""

    __slots__ = ("blocks", "drafts", "new", "tokens")

    def __init__(self, new: NewSequence) -> None:
        self.new = new
        self.tokens = list(new.token_ids)
        self.blocks = list(new.block_ids)
        self.drafts: list[int] = []  # for its next step


class NullPending:
    """A step that is complete already."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output
        self.ready_s = 0.0  # by time.perf_counter

    def done(self) -> bool:
        """Whether its time has come."""
        return time.perf_counter() >= self.ready_s

    def wait(self) -> ModelRunnerOutput:
        """The step's output."""
        while (left_s := self.ready_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return self._output


class NullWorker:
    """Runs steps on a cache of plain numbers."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlugins | None = None,
        rank: int = 0,
        world_size: int = 1,
        address: str = "",
    ) -> None:
        self.config = config
        self.rank = rank
        self.options = msgspec.convert(config.model.hf_config.get("null", {}), NullOptions)
        self.model = NullModel(self.options.vocab_size)
        self.block_size = self.options.block_size or config.cache.block_size
        self.num_steps = 0
        self._busy_until_s = 0.0
        self._num_drafts = 0
        if config.speculative is not None:
            self._num_drafts = config.speculative.num_speculative_tokens
        self._sequences: dict[int, _State] = {}
        self._rows = BatchRows.of([], [], [])
        self._cache: list[array[int]] = []
        self._host: list[memoryview[int]] = []

    def load(self) -> WorkerInfo:
        """No weights, no memory; limits as the options say."""
        options = self.options
        overlaps = options.overlap and self.config.batch.overlap
        return WorkerInfo(
            num_layers=1,
            vocab_size=options.vocab_size,
            max_model_len=self.config.model.max_model_len,
            bytes_per_block=self.block_size * 8,
            available_bytes=options.num_blocks * self.block_size * 8,
            block_size=self.block_size,
            block_sharing=options.block_sharing,
            mixed_batches=options.mixed_batches,
            max_prefills_per_step=options.max_prefills_per_step,
            chunked_prefill=options.chunked_prefill,
            max_step_tokens=options.max_step_tokens,
            max_step_rows=options.max_step_rows,
            overlap=options.overlap,
            asynchronous=options.asynchronous,
            host_tier=options.host_tier,
            logprobs=options.logprobs,
            max_decodes=1 if overlaps or self._num_drafts else options.decodes_per_step,
            device="null",
            tensor_library="none",
            report=[f"rank {self.rank}: a fake device, no model is run"],
        )

    def initialize_cache(
        self, num_blocks: int, num_host_blocks: int = 0, *, host_files: Sequence[str] = ()
    ) -> None:
        """Empty slots; those of the host tier in a file if one is named."""
        size = self.block_size
        self._cache = [array("Q", [_EMPTY] * size) for _ in range(num_blocks)]
        host = memoryview(bytearray(num_host_blocks * size * 8))
        if host_files and num_host_blocks:
            with Path(host_files[self.rank]).open("r+b") as file:
                file.truncate(len(host))
                host = memoryview(mmap.mmap(file.fileno(), len(host)))
        slots = host.cast("Q")
        self._host = [slots[i * size : (i + 1) * size] for i in range(num_host_blocks)]

    def launch(self, step: SchedulerOutput) -> NullPending:
        """Do the step."""
        started = time.perf_counter()
        rows = self._rows = (
            step.rows if step.rows is not None else self._rows.next(step.num_decodes)
        )
        output = ModelRunnerOutput(step_id=step.step_id, token_ids=rows.starts)
        if self.options.predictable:
            self._prepare(step)
            self._run_rows(step, rows, output)
        elif step.num_decodes > 1:
            output.counts, output.token_ids = rows.counts, np.repeat(rows.starts, rows.counts)
        elif not rows.is_decode:
            output.counts = rows.samples.astype(np.int64)
            output.token_ids = rows.starts[rows.samples]
            if rows.num_drafts.any():
                output.num_drafts = output.num_accepted = np.zeros((1, rows.samples.size), np.int64)
        self.num_steps += 1
        slow_file, step_s = self.options.slow_file, self.options.step_s
        if slow_file and (self.config.model.path / slow_file).exists():
            step_s = SLOW_STEP_S
        output.model_s = output.execute_s = time.perf_counter() - started + step_s
        pending = NullPending(output)
        if step_s:
            # One step after the other, as in a device's queue.
            self._busy_until_s = max(started, self._busy_until_s) + step_s
            pending.ready_s = self._busy_until_s
            if not self.options.asynchronous:
                pending.wait()
        return pending

    def seq_ids(self, step: SchedulerOutput) -> list[int]:
        """The sequences of a step that is about to be launched or was just launched."""
        rows = self._rows if step.rows is None else step.rows
        return [int(seq_id) for seq_id in rows.seq_ids]

    def close(self) -> None:
        """Forget everything."""
        self._sequences.clear()
        self._cache = []
        self._host = []

    def _prepare(self, step: SchedulerOutput) -> None:
        for seq_id in step.finished_seq_ids:
            self._sequences.pop(seq_id, None)
        for new in step.new_sequences:
            if new.seq_id in self._sequences:
                raise RuntimeError(f"sequence {new.seq_id} is new twice")
            self._sequences[new.seq_id] = _State(new)
        self._copy(step)

    def _copy(self, step: SchedulerOutput) -> None:
        for source, target in step.copies.device_to_host:
            self._host[target][:] = memoryview(self._cache[source])
        for source, target in step.copies.host_to_device:
            self._cache[target] = array("Q", self._host[source])
        for source, target in step.copies.device_to_device:
            self._cache[target] = self._cache[source][:]

    def _run_rows(self, step: SchedulerOutput, rows: BatchRows, output: ModelRunnerOutput) -> None:
        size, num_decodes = rows.seq_ids.size, step.num_decodes
        tokens: list[list[int]] = [[] for _ in range(size)]
        num_drafts = np.zeros((num_decodes, size), dtype=np.int64)
        num_accepted = np.zeros_like(num_drafts)
        for row, seq_id in enumerate(rows.seq_ids.tolist()):
            state = self._sequences[seq_id]
            state.blocks.extend(step.new_block_ids.get(row, ()))
            sampling = state.new.sampling
            for nth in range(num_decodes):
                start, count, drafts = self._exact(state, rows, row, num_decodes)
                self._feed(state, start, count, drafts)
                if sampling.prompt_logprobs is not None:
                    output.prompt_logprobs[row] = self._prompt_logprobs(state, start, count)
                state.drafts = []  # those there were followed a token that is no longer the newest
                if rows.samples[row]:  # on every rank: all ranks compute the same token
                    sampled = self._sample(state, drafts, start + count)
                    num_drafts[nth, row], num_accepted[nth, row] = len(drafts), len(sampled) - 1
                    tokens[row] += sampled
                    state.drafts = self._draft(state)[: max(0, step.max_drafts)]
            if sampling.logprobs is not None:
                output.logprobs[row] = [self._logprobs(t, sampling.logprobs) for t in tokens[row]]
        output.token_ids = np.array([t for some in tokens for t in some], dtype=np.int64)
        output.counts = np.array([len(some) for some in tokens], dtype=np.int64)
        if rows.num_drafts.any():
            output.num_drafts, output.num_accepted = num_drafts, num_accepted

    def _exact(
        self, state: _State, rows: BatchRows, row: int, num_decodes: int
    ) -> tuple[int, int, list[int]]:
        """What a row, whose numbers are the most that can be, is fed in its next decode: the first
        token, how many known ones, and the drafts after them, as far as there are blocks. A
        sequence that has come to its limit, which the engine may not know yet, is fed its last
        token again."""
        num_drafts = int(rows.num_drafts[row])
        count = (int(rows.counts[row]) - num_drafts) // num_decodes
        room = len(state.blocks) * self.block_size - count
        start = len(state.tokens) - 1
        if num_decodes == 1:
            start = min(start, int(rows.starts[row]))
        if len(state.tokens) >= self._limit(state):
            start = min(start, room)
        elif start > room:
            raise RuntimeError(
                f"sequence {state.new.seq_id}: tokens {start} to {start + count} are to be fed, "
                f"its {len(state.blocks)} blocks hold {room + count}"
            )
        return start, count, state.drafts[: max(0, min(num_drafts // num_decodes, room - start))]

    def _limit(self, state: _State) -> int:
        """How many tokens a sequence can have."""
        limit = min(self.config.model.max_model_len, len(self._cache) * self.block_size)
        asked = state.new.sampling.max_tokens
        return limit if asked is None else min(limit, state.new.num_prompt_tokens + asked)

    def _feed(self, state: _State, start: int, count: int, drafts: list[int]) -> None:
        known = state.tokens[start : start + count]
        if len(known) != count:
            raise RuntimeError(
                f"sequence {state.new.seq_id}: tokens {start} to {start + count} are to be fed, "
                f"{len(state.tokens)} are known"
            )
        self._write(state, start, known + drafts)

    def _write(self, state: _State, start: int, fed: list[int]) -> None:
        size, blocks, cache = self.block_size, state.blocks, self._cache
        before = _FIRST
        if start:
            before = cache[blocks[(start - 1) // size]][(start - 1) % size]
        for position, token in enumerate(fed, start):
            before = self.model.state(before, token)
            cache[blocks[position // size]][position % size] = before

    def _read(self, state: _State, num_tokens: int) -> array[int]:
        """All slots of the first num_tokens tokens, through the block table."""
        states: array[int] = array("Q")
        for block in state.blocks[: -(-num_tokens // self.block_size)]:
            states.extend(self._cache[block])
        return states[:num_tokens]

    def _sample(self, state: _State, drafts: list[int], num_known: int) -> list[int]:
        # Without room for more tokens a sequence is fed its last one again.
        del state.tokens[num_known:]
        tokens: list[int] = []
        for index in range(len(drafts) + 1):
            token = self._next(state, num_known + index)
            tokens.append(token)
            state.tokens.append(token)
            if index == len(drafts) or drafts[index] != token:
                break
        return tokens

    def _next(self, state: _State, num_tokens: int) -> int:
        """The next token; a stop token is replaced by its neighbour below min_tokens."""
        sampling = state.new.sampling
        token = self.model.next_token(self._read(state, num_tokens), sampling, state.new.seed)
        if num_tokens - state.new.num_prompt_tokens < sampling.min_tokens:
            stops = {*state.new.eos_token_ids, *(sampling.stop_token_ids or ())}
            while token in stops:
                token = (token + 1) % self.model.vocab_size
        return token

    def _draft(self, state: _State) -> list[int]:
        right = self.model.expected(
            state.tokens, self._num_drafts, state.new.sampling, state.new.seed
        )
        limit = int(self.options.draft_accuracy * 100)
        size = self.model.vocab_size
        return [t if _mix(len(state.tokens) + t) % 100 < limit else (t + 1) % size for t in right]

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        size = self.model.vocab_size
        others = [(token + 1 + i) % size for i in range(count if count >= 0 else size - 1)]
        return TokenLogprobs([token, *others], [-0.5 - i for i in range(len(others) + 1)], 1)

    def _prompt_logprobs(self, state: _State, start: int, count: int) -> list[TokenLogprobs]:
        end = min(start + count, state.new.num_prompt_tokens - 1)
        number = state.new.sampling.prompt_logprobs or 0
        return [self._logprobs(state.tokens[p + 1], number) for p in range(start, end)]
