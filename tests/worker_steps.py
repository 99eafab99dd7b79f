"""Drives a real Worker on a tiny random model without engine or scheduler.

Blocks are handed out in a scattered order. `Steps.run` plays a whole random life of a batch:
arrivals, chunked prefill beside decode, preemption, host-tier swaps, steps launched ahead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.config import (
    BatchConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
)
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import (
    BatchRows,
    BlockCopies,
    ModelRunnerOutput,
    NewSequence,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from fastdeploy_core.worker.slots import NEW
from fastdeploy_core.worker.worker import Worker


@dataclass
class Row:
    """One row of a step to be sent."""

    seq_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    sample: bool = True


@dataclass
class RowOutput:
    """What one row of a step brought."""

    seq_id: int
    token_ids: list[int]
    num_accepted_drafts: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


def message_rows(rows: Sequence[Row]) -> tuple[BatchRows, dict[int, list[int]]]:
    """Rows in columns, and their new blocks."""
    columns = BatchRows.of(
        [row.seq_id for row in rows],
        [row.start for row in rows],
        [row.num_tokens for row in rows],
        [row.sample for row in rows],
        [len(row.drafts) for row in rows],
    )
    return columns, {n: row.new_block_ids for n, row in enumerate(rows) if row.new_block_ids}


def make_step(*rows: Row, step_id: int = 0) -> SchedulerOutput:
    """A message of nothing but rows."""
    columns, blocks = message_rows(rows)
    return SchedulerOutput(step_id=step_id, rows=columns, new_block_ids=blocks)


def plant_drafts(worker: Worker, rows: Sequence[Row]) -> None:
    """The rows' drafts become those that the worker holds for their next step."""
    slots = worker._runner.slots
    worker._runner._results.read_all()
    with worker.device.xp.no_grad():
        slots._send([])  # of what former sequences left, as before a drafter leaves drafts
    xp, device = slots._xp, worker.device
    for row in rows:
        slot = slots.slot_of.get(row.seq_id)
        if slot is None or not slots.max_drafts:
            continue
        slots.num_drafts[slot] = len(row.drafts)
        slots._drafts_are[slot], slots.has_drafts = NEW, True
        slots.draft_ids[slot, : len(row.drafts)] = row.drafts
        where = device.to_device(np.array([slot]))
        xp.index_copy_(slots.state.drafts, 0, where, device.to_device(slots.draft_ids[[slot]]))
        xp.index_copy_(slots.state.num_drafts, 0, where, where * 0 + len(row.drafts))


def outputs_of(seq_ids: Sequence[int], output: ModelRunnerOutput) -> list[RowOutput]:
    """An answer row by row."""
    counts = [1] * len(seq_ids) if output.counts is None else output.counts.tolist()
    assert sum(counts) == output.token_ids.size
    tokens = iter(output.token_ids.tolist())
    return [
        RowOutput(
            seq_id,
            [next(tokens) for _ in range(counts[row])],
            max(0, counts[row] - 1),
            output.logprobs.get(row),
            output.prompt_logprobs.get(row),
            output.errors.get(row),
        )
        for row, seq_id in enumerate(seq_ids)
    ]


VOCAB = 131
BLOCK_SIZE = 4
EOS = 2
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, *, with_tokenizer: bool = False) -> Path:
    """A config.json, on request a tokenizer.json; weights are made up by --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(LLAMA)
    if with_tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            special_tokens=["<unk>", "<s>", "</s>", "<think>", "</think>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(['{"name": "value", "list": [1, 2, 3]}'] * 5, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        config["vocab_size"] = tokenizer.get_vocab_size() + 5
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def engine_config(
    folder: Path, library: str, *, max_num_seqs: int = 8, tp: int = 1, **settings: Any
) -> EngineConfig:
    cache = {"block_size": BLOCK_SIZE, "num_blocks_override": 256} | settings.pop("cache", {})
    model = {"load_format": "dummy", "max_model_len": 96} | settings.pop("model", {})
    return EngineConfig(
        model=read_model_config(folder, model),
        cache=CacheConfig(**cache),
        batch=BatchConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        device=DeviceConfig(device="cpu", tensor_library=library, num_threads=1),
        parallel=ParallelConfig(tensor_parallel_size=tp),
        **settings,
    )


def make_worker(config: EngineConfig, **place: Any) -> Worker:
    shapes = read_shapes(config.model.hf_config, 1, config.model.dtype)
    moe = [] if shapes.moe is None else [shapes.moe]
    return Worker(config, resolve(config, layers=shapes.layers, moe=moe), **place)


def sharpen(worker: Worker) -> None:
    """Dummy weights give nearly flat logits; larger ones make tokens depend on the whole
    context."""
    runner = worker._runner
    xp = runner._xp
    with xp.no_grad():
        for tensor in _weights(runner._loaded.model, xp):
            if tensor.ndim == 2:
                tensor.mul_(xp.tensor(3.0, dtype=tensor.dtype))


def _weights(thing: Any, xp: Any, seen: set[int] | None = None) -> list[Any]:
    """Every float tensor reachable from a model's attributes, once."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, xp.tensor_type):
        return [thing] if "float" in xp.dtype_name(thing) else []
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [t for item in thing for t in _weights(item, xp, seen)]
    if type(thing).__module__.startswith("fastdeploy_core.") and hasattr(thing, "__dict__"):
        if type(thing).__name__ in ("ModelBuilder", "CpuDevice"):
            return []
        return _weights(vars(thing), xp, seen)
    return []


class Steps:
    """One worker and the book-keeping a scheduler would do for it."""

    def __init__(self, worker: Worker, num_blocks: int = 256, num_host_blocks: int = 0) -> None:
        self.worker = worker
        worker.initialize_cache(num_blocks, num_host_blocks)
        self.free = np.random.default_rng(9).permutation(num_blocks).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.new: dict[int, NewSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.finished: list[int] = []
        self.step_id = 0
        self.sent: dict[int, list[int]] = {}  # sequences of each step

    def add(
        self,
        seq_id: int,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        **fields: Any,
    ) -> None:
        self.tokens[seq_id], self.computed[seq_id] = list(prompt), 0
        self.blocks[seq_id] = []
        self.new[seq_id] = NewSequence(
            seq_id=seq_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            block_ids=[],
            sampling=sampling or SamplingParams(temperature=0),
            seed=fields.pop("seed", seq_id + 1000),
            eos_token_ids=[EOS],
            **fields,
        )

    def row(self, seq_id: int, count: int | None = None, drafts: list[int] | None = None) -> Row:
        """Feed `count` tokens (all known ones that are not computed), plus drafts."""
        start, drafts = self.computed[seq_id], drafts or []
        left = max(1, len(self.tokens[seq_id]) - start)  # 1: the token of a step still in flight
        count = left if count is None else min(count, left)
        end = start + count + len(drafts)
        needed = -(-end // BLOCK_SIZE) - len(self.blocks[seq_id])
        blocks = [self.free.pop() for _ in range(needed)]
        self.blocks[seq_id] += blocks
        self.computed[seq_id] = start + count
        return Row(
            seq_id,
            start,
            count + len(drafts),
            blocks,
            drafts,
            sample=start + count >= len(self.tokens[seq_id]),
        )

    def message(self, rows: list[Row], copies: BlockCopies | None = None) -> SchedulerOutput:
        self.step_id += 1
        new = [self.new.pop(r.seq_id) for r in rows if r.seq_id in self.new]
        finished, self.finished = self.finished, []
        columns, blocks = message_rows(rows)
        self.sent[self.step_id] = [row.seq_id for row in rows]
        return SchedulerOutput(
            step_id=self.step_id,
            new_sequences=new,
            rows=columns,
            new_block_ids=blocks,
            finished_seq_ids=finished,
            copies=copies or BlockCopies(),
        )

    def launch(self, rows: list[Row], copies: BlockCopies | None = None) -> Any:
        plant_drafts(self.worker, rows)
        return self.worker.launch(self.message(rows, copies))

    def take(self, output: ModelRunnerOutput) -> list[RowOutput]:
        rows = outputs_of(self.sent[output.step_id], output)
        for row in rows:
            if row.seq_id in self.tokens:
                self.tokens[row.seq_id] += row.token_ids
                if len(row.token_ids) > 1:
                    self.computed[row.seq_id] += len(row.token_ids) - 1
        return rows

    def step(self, rows: list[Row]) -> list[RowOutput]:
        return self.take(self.launch(rows).wait())

    def finish(self, seq_id: int) -> list[int]:
        self.finished.append(seq_id)
        self.free += self.blocks.pop(seq_id)
        self.computed.pop(seq_id)
        self.new.pop(seq_id, None)
        return self.tokens.pop(seq_id)

    def preempt(self, seq_id: int, prompt: int, sampling: SamplingParams, **fields: Any) -> None:
        """Forget the sequence and bring it back with everything it generated."""
        tokens = self.finish(seq_id)
        self.add(seq_id, tokens, sampling, **fields)
        self.new[seq_id].num_prompt_tokens = prompt

    def alone(
        self, prompt: list[int], count: int, sampling: SamplingParams, seed: int
    ) -> list[int]:
        """`count` tokens of one sequence that has the worker to itself, one step at a time."""
        self.add(10**6, prompt, sampling, seed=seed)
        for _ in range(count):
            (row,) = self.step([self.row(10**6)])
            assert row.error is None
        return self.finish(10**6)[len(prompt) :]
