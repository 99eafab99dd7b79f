"""Slots and layout of a step against a slow book-keeper, host against device, and slots that are
truly empty when they are given back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SpeculativeConfig,
)
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.model import Retention
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.sampling.columns import SamplingColumns
from fastdeploy_core.sampling.state import SamplingState
from fastdeploy_core.types import NewSequence, SamplingParams
from fastdeploy_core.worker.layout import HostLayout, place
from fastdeploy_core.worker.slots import Slots
from fastdeploy_core.worker.step import StepRows
from tests.worker_steps import Row, engine_config, make_step, write_model

SLOTS, LENGTH, BLOCK = 5, 40, 4


@pytest.fixture
def device(tensor_library: str) -> CpuDevice:
    return CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


def new_sequence(seq_id: int, tokens: list[int], blocks: list[int]) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_ids=blocks,
        sampling=SamplingParams(),
        seed=0,
    )


def make_slots(
    device: CpuDevice,
    size: int = SLOTS,
    length: int = LENGTH,
    *,
    num_drafts: int = 0,
    max_decodes: int = 1,
    parts: Sequence[Any] = (),
) -> Slots:
    config = EngineConfig(
        model=ModelConfig(Path("none"), Path("none"), max_model_len=length),
        cache=CacheConfig(block_size=BLOCK),
        batch=BatchConfig(max_num_seqs=size),
        speculative=SpeculativeConfig("any", num_drafts) if num_drafts else None,
    )
    made_of = (device, build_kernel_table("cpu"), config, 131, parts)
    return Slots(*made_of, max_decodes=max_decodes, is_read=True)


class Book:
    """What a batch must look like, kept one token at a time."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.unread: dict[int, int] = {}  # the newest token, known to the device only

    def token(self, seq_id: int, position: int, drafts: list[int]) -> int:
        known = self.tokens[seq_id]
        if position < len(known):
            return known[position]
        if seq_id in self.unread:
            if position == len(known):
                return self.unread[seq_id]
            return drafts[position - len(known) - 1]
        return drafts[position - len(known)]


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_what_the_book_keeper_says(
    device: CpuDevice, seed: int, num_drafts: int
) -> None:
    """Without drafts tokens may be left on the device for the next step."""
    rng, book, next_id, next_block = np.random.default_rng(seed), Book(), 0, 1
    batch = make_slots(device, num_drafts=num_drafts)
    layout = HostLayout(device, batch)
    for _ in range(150):
        for seq_id in list(book.tokens):
            if rng.random() < 0.1 or book.computed[seq_id] > LENGTH - 6:
                batch.remove(seq_id)
                for part in (book.tokens, book.blocks, book.computed, book.unread):
                    part.pop(seq_id, None)
        while len(book.tokens) < SLOTS and rng.random() < 0.5:
            tokens = rng.integers(1, 100, int(rng.integers(1, 12))).tolist()
            book.tokens[next_id], book.blocks[next_id], book.computed[next_id] = tokens, [], 0
            batch.add(new_sequence(next_id, tokens, []))
            next_id += 1
        chosen = [n for n in rng.permutation(list(book.tokens)).tolist() if rng.random() < 0.8]
        rows, plan = [], []
        for seq_id in chosen:
            start, known = book.computed[seq_id], len(book.tokens[seq_id])
            count = max(1, min(int(rng.integers(1, 8)), known - start))
            last = start + count >= known
            drafts = rng.integers(1, 100, int(rng.integers(0, 1 + num_drafts))).tolist()
            if known - start > 1:
                drafts = []
            end = start + count + len(drafts)
            needed = -(-end // BLOCK) - len(book.blocks[seq_id])
            blocks = list(range(next_block, next_block + needed))
            next_block += needed
            book.blocks[seq_id] += blocks
            rows.append(Row(seq_id, start, end - start, blocks, drafts, last))
            plan.append((seq_id, start, end, drafts, last))
        if not rows:
            continue
        for row in rows:
            slot = batch.slot_of[row.seq_id]
            batch.num_drafts[slot] = len(row.drafts)
            batch.draft_ids[slot, : len(row.drafts)] = row.drafts
        made = batch.rows(make_step(*rows))
        if num_drafts:
            made = batch.exact(made, np.zeros(len(rows), dtype=np.int64))
        attention, ids = layout.lay_out(made)[:2]
        input_ids = device.to_host(ids).tolist()
        expected_ids, expected_slots, sampled = [], [], []
        for seq_id, start, end, drafts, last in plan:
            for position in range(start, end):
                expected_ids.append(book.token(seq_id, position, drafts))
                block = book.blocks[seq_id][position // BLOCK]
                expected_slots.append(block * BLOCK + position % BLOCK)
            if last:
                first = end - len(drafts)
                sampled += [
                    (seq_id, p, len(expected_ids) - (end - p) - 1) for p in range(first, end + 1)
                ]
        assert input_ids == expected_ids
        assert device.to_host(attention.slot_mapping).tolist() == expected_slots
        assert attention.seq_lens.tolist() == [end for _, _, end, _, _ in plan]
        assert device.to_host(attention.seq_lens_dev).tolist() == attention.seq_lens.tolist()
        offsets = np.cumsum([0] + [end - start for _, start, end, _, _ in plan]).tolist()
        assert attention.cu_seqlens_q.tolist() == offsets
        assert device.to_host(attention.cu_seqlens_q_dev).tolist() == offsets
        width = attention.block_tables.shape[1]
        for row, (seq_id, _, end, _, _) in enumerate(plan):
            table = (book.blocks[seq_id] + [0] * width)[:width]
            assert attention.block_tables[row].tolist() == table
            assert width * BLOCK >= end
        assert (device.to_host(attention.block_tables_dev) == attention.block_tables).all()
        assert [
            (int(batch.seq_ids[made.slots[r]]), p, t)
            for r, p, t in zip(
                made.positions().rows.tolist(),
                made.sample_positions().tolist(),
                made.positions().tokens.tolist(),
                strict=True,
            )
        ] == sampled
        settle(batch, book, device, plan, made, rng)


def settle(
    batch: Slots, book: Book, device: CpuDevice, plan: Any, made: StepRows, rng: Any
) -> None:
    """Draw tokens: read by the host at once, or left on the device for the next step."""
    for seq_id, start, end, drafts, last in plan:
        book.computed[seq_id] = end - len(drafts) if last else end
        if start >= len(book.tokens[seq_id]) and seq_id in book.unread:
            book.tokens[seq_id].append(book.unread.pop(seq_id))  # it has been fed by now
    drawn = {seq_id: int(rng.integers(1, 100)) for seq_id, _, _, _, last in plan if last}
    if not drawn:
        return
    slots = np.array([batch.slot_of[s] for s in drawn], dtype=np.int64)
    ids = np.array(list(drawn.values()), dtype=np.int64)
    batch.take_sampled(made, device.to_device(slots), device.to_device(ids))
    reads = batch.max_drafts or rng.random() < 0.5
    for seq_id, token in drawn.items():
        if reads:
            book.tokens[seq_id].append(token)
        else:
            book.unread[seq_id] = token
    if reads:
        batch.learn(slots, batch.version, ids, np.ones_like(ids))


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_learned_by_those_they_belong_to(device: CpuDevice, seed: int) -> None:
    """Steps of several decodes with drafts, up to and beyond the longest sequence there can be, and
    a slot that changes hands while its results are on their way."""
    rng, most = np.random.default_rng(seed), 2 * (1 + 3)
    batch = make_slots(device, num_drafts=3, max_decodes=2)
    book = {seq_id: rng.integers(1, 100, 5).tolist() for seq_id in range(SLOTS)}
    for seq_id, tokens in book.items():
        batch.add(new_sequence(seq_id, tokens, []))
    for step in range(20):
        chosen = rng.permutation(list(book)).tolist()[: int(rng.integers(1, SLOTS + 1))]
        slots = np.array([batch.slot_of[seq_id] for seq_id in chosen], dtype=np.int64)
        counts, version = rng.integers(0, most + 1, slots.size), batch.version
        if step % 5 == 4:  # the first one ends, and another sequence gets its place
            batch.remove(gone := chosen[0])
            del book[gone]
            book[100 + step] = [1, 2]
            batch.add(new_sequence(100 + step, [1, 2], []))
            assert batch.slot_of[100 + step] == slots[0]
        tokens = rng.integers(1, 100, int(counts.sum()))
        batch.learn(slots, version, tokens, counts)
        for seq_id, own in zip(chosen, np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            if seq_id in book:
                book[seq_id] += own.tolist()
        for seq_id, known in book.items():
            del known[LENGTH + 1 :]
            slot = batch.slot_of[seq_id]
            assert batch.num_known[slot] == len(known)
            assert batch.token_ids[slot, : len(known)].tolist() == known
    assert any(len(known) > LENGTH for known in book.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_device_places_tokens_as_the_host_does(device: CpuDevice, seed: int) -> None:
    """Kernel prepare_decode reads out of the slots what `place` works out on the host."""
    rng, xp = np.random.default_rng(seed), device.xp
    slots, kernels = make_slots(device, num_drafts=3), build_kernel_table("cpu")
    blocks = rng.permutation(100).tolist()
    for seq_id in range(4):
        tokens = rng.integers(1, 100, int(rng.integers(2, 20))).tolist()
        slots.add(new_sequence(seq_id, tokens, [blocks.pop() for _ in range(6)]))
        slots.num_drafts[slots.slot_of[seq_id]] = rng.integers(0, 4)
    slots.draft_ids[:] = rng.integers(1, 100, slots.draft_ids.shape)
    ids = rng.permutation(4)[:3].tolist()
    known = [int(slots.num_known[slots.slot_of[seq_id]]) for seq_id in ids]
    step = make_step(
        *(Row(n, end - 1, 4, drafts=[0] * 3) for n, end in zip(ids, known, strict=True))
    )
    rows = slots.exact(slots.rows(step), np.zeros(len(step.rows.counts), dtype=np.int64))
    token_slots, positions, cache_slots = place(rows, slots)
    slots.bring(rows, 5, 3, drafts=rows)
    state, width = slots.state, 4

    def empty(*shape: int, dtype: object = xp.int64) -> Any:
        return xp.zeros(shape, dtype=dtype, device=device.device)

    made = [empty(5 * width) for _ in range(3)]
    lengths, tables = (
        empty(5, dtype=xp.int32),
        empty(5, slots.block_tables.shape[1], dtype=xp.int32),
    )
    held = (state.tables, state.num_computed, state.newest, state.drafts, state.num_drafts)
    kernels["prepare_decode"](
        *(state.rows[:5], *held, state.room, BLOCK, state.turn, *made, lengths, tables)
    )
    input_ids, where, mapping = (device.to_host(x).reshape(5, width) for x in made)
    is_real = np.arange(width) < rows.counts[:, None]
    assert where[:3][is_real].tolist() == positions.tolist()
    assert mapping[:3][is_real].tolist() == cache_slots.tolist()
    assert input_ids[:3][is_real].tolist() == slots.token_ids[token_slots, positions].tolist()
    assert (mapping[:3][~is_real] == -1).all() and (mapping[3:] == -1).all()


def test_drafts_on_the_device_leave_with_their_sequence(device: CpuDevice) -> None:
    """The next one in the slot has not asked for them, and may have no room for them."""
    slots = make_slots(device, num_drafts=3)
    slots.add(new_sequence(1, [5, 6, 7], [1, 2]))
    rows = slots.rows(make_step(Row(1, 2, 1)))
    slots.bring(rows, 1, 3)
    slots.note_drafts(rows, 3)
    slots.state.num_drafts[0] = 3  # as a drafter left them
    slots.remove(1)
    slots.add(new_sequence(2, [8, 9, 4], [3]))
    prompt = slots.rows(make_step(Row(2, 0, 3)))
    sampled = np.array([0]), np.array([6])
    slots.take_sampled(prompt, *map(device.to_device, sampled))
    slots.note_drafts(prompt, 0)
    slots.bring(slots.rows(make_step(Row(2, 3, 1))), 1, 0)
    assert device.to_host(slots.state.num_drafts)[0] == 0
    assert not slots.has_drafts


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_drafts_of_rows_of_any_length_are_verified(
    device: CpuDevice, seed: int, refuses: bool
) -> None:
    """The leading drafts that are what was sampled in their place, before one after which nothing
    valid came."""
    rng = np.random.default_rng(seed)
    slots = make_slots(device, num_drafts=3)
    if refuses:
        slots._no_drafts = slots.state.drafts - 1
    for seq_id in range(4):
        slots.add(new_sequence(seq_id, [5, 6, 7], [2 * seq_id, 2 * seq_id + 1]))
    slots.num_drafts[:4] = rng.integers(0, 4, 4)
    slots.num_drafts[rng.integers(0, 4)] = 3
    slots.draft_ids[:] = rng.integers(0, 3, slots.draft_ids.shape)
    chunk = int(rng.integers(0, 4))  # of this one a part of the prompt is computed
    step = make_step(
        *(
            Row(n, 0, 2, sample=False) if n == chunk else Row(n, 2, 4, drafts=[0] * 3)
            for n in range(4)
        )
    )
    rows = slots.exact(slots.rows(step), np.zeros(len(step.rows.counts), dtype=np.int64))
    where = rows.positions()
    sampled = rng.integers(0, 3, where.rows.size)
    marked = np.where(rng.random(sampled.size) < 0.1, -2, sampled)
    results, accepted, kept = slots.verify(
        rows, device.to_device(sampled), device.to_device(marked)
    )
    expected_counts, expected_results, expected_kept = [], [], []
    for row in np.flatnonzero(rows.samples).tolist():
        own = np.flatnonzero(where.rows == row)
        drafts = slots.draft_ids[rows.slots[row]]
        count = 0
        while count < rows.num_drafts[row] and not refuses:
            if sampled[own[count]] != drafts[count] or marked[own[count + 1]] < 0:
                break
            count += 1
        expected_counts.append(count)
        expected_kept += [nth <= count and marked[own[nth]] >= 0 for nth in range(own.size)]
        told = [int(marked[place]) for place in own[: count + 1]]
        expected_results.append(told + [-1] * (rows.width - len(told)))
        slot = int(rows.slots[row])
        assert device.to_host(slots.state.num_computed)[slot] == 2 + 1 + count
        assert device.to_host(slots.state.newest)[slot] == sampled[own[count]]
    assert device.to_host(accepted).tolist() == expected_counts
    assert device.to_host(results).tolist() == expected_results
    assert device.to_host(kept).tolist() == expected_kept


def test_blocks_far_into_a_large_pool_do_not_overflow(device: CpuDevice) -> None:
    batch = make_slots(device, 1, 8)
    far = 2**30
    batch.add(new_sequence(1, [5, 6], [far]))
    rows = batch.rows(make_step(Row(1, 0, 2)))
    attention = HostLayout(device, batch).lay_out(rows).attention
    assert device.to_host(attention.slot_mapping).tolist() == [far * 4, far * 4 + 1]


def test_a_sequence_that_cannot_fit_is_refused(device: CpuDevice) -> None:
    batch = make_slots(device, 2, 8)
    with pytest.raises(WorkerError, match="9 tokens"):
        batch.add(new_sequence(1, [1] * 9, []))
    batch.add(new_sequence(1, [1], [0]))
    batch.add(new_sequence(2, [1], [1]))
    with pytest.raises(WorkerError, match="2 slots"):
        batch.add(new_sequence(3, [1], [2]))
    batch.remove(77)  # unknown ids are nobody's business
    batch.remove(1)
    batch.add(new_sequence(3, [1], [2]))


# -- S-20: nothing survives in a slot -------------------------------------------------------------


def contents(thing: Any, device: CpuDevice, slot: int) -> dict[str, Any]:
    """Everything an object holds for one slot: rows of arrays and tensors, entries of lists, dicts
    and sets."""
    found: dict[str, Any] = {}
    entries = dict(vars(thing))
    # Penalties keep their tensors in a tuple, slots further block tables by their rule.
    more = entries.pop("more_tables", {})
    for number, table in enumerate((*(entries.get("_tables") or ()), *more.values())):
        entries[f"table {number}"] = table
    for name, value in entries.items():
        if isinstance(value, device.xp.tensor_type):
            value = np.array(device.to_host(value))
        if name == "owner":
            continue  # a counter that must grow
        if isinstance(value, np.ndarray) and value.ndim and value.shape[0] == SLOTS:
            found[name] = value[slot].tolist()
        elif isinstance(value, list) and len(value) == SLOTS:
            found[name] = repr(value[slot])
        elif isinstance(value, dict | set) and name not in ("_uniform", "_even_offsets"):
            found[name] = slot in value or slot in getattr(value, "values", list)()
    return found


EVERYTHING = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "min_tokens": 5,
    "max_tokens": 9,
    "stop_token_ids": [3],
    "allowed_token_ids": [5, 6, 7],
    "bad_words_token_ids": [[5], [6, 7]],
    "logit_bias": {6: 1.0},
    "logprobs": 2,
    "logprob_token_ids": [4, 9],
    "prompt_logprobs": 3,
    "logits_processors_args": {"logit_bias": {"5": 1.0}},
    "thinking_token_budget": 3,
}


def test_a_slot_given_back_holds_nothing(
    device: CpuDevice, tensor_library: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_model(tmp_path_factory.mktemp("model"), with_tokenizer=True)
    names = ("LogitBiasLogitsProcessor",)
    config = engine_config(folder, tensor_library, max_num_seqs=SLOTS, logits_processors=names)
    columns = SamplingColumns(SLOTS, 310)
    state = SamplingState(config, device, build_kernel_table("cpu"), columns, lookup)
    parts = [columns, *state.parts]
    members = [member for part in state.parts for member in getattr(part, "_members", [])]
    batch = make_slots(device, num_drafts=2, parts=parts)
    batch.add_groups([Retention("window", 4)])

    def everything(slot: int) -> list[dict[str, Any]]:
        processors = [vars_of_member(m) for m in members]
        return [contents(t, device, slot) for t in [batch, *parts]] + [
            {str(i): slot in m["slots"] or 42 in m["state"]} for i, m in enumerate(processors)
        ]

    def vars_of_member(member: Any) -> dict[str, Any]:
        inner = vars(member.processor)
        return {
            "slots": member.seq_ids,
            "state": {k for v in inner.values() if isinstance(v, dict) for k in v},
        }

    def arrive(seq_id: int, **fields: Any) -> int:
        new = new_sequence(seq_id, [1, 2, 3, 5, 6], [7, 9, 8, 10])  # of two groups of layers
        new.num_prompt_tokens, new.sampling = 3, SamplingParams(**fields)
        slot = batch.add(new)
        columns.add(slot, new.sampling, 99)
        state.add(slot, new)
        batch.is_held[slot] = batch._has_history[slot] = True
        batch._num_sent[slot] = batch.num_drafts[slot] = batch._drafts_are[slot] = 1
        batch.draft_ids[slot] = 7
        return slot

    arrive(41, presence_penalty=1.0)  # makes the penalty tables, in slot 0
    clean = everything(1)
    slot = arrive(42, **EVERYTHING)
    assert slot == 1
    used = everything(1)
    for before, after in zip(clean[:2], used[:2], strict=True):
        untouched = {name for name in before if before[name] == after[name]}
        # What the rows of the last step were is of no sequence.
        assert untouched <= {"_free", "_sent_rows"}, f"the test fills all but {untouched}"
    batch.remove(42)
    assert everything(1) == clean
