"""The reference attention against a loop in float64, over scattered, shared and dirty blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.reference import attention_plan
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice


@pytest.fixture(scope="module", params=["tiles", "lists"])
def device(request, tensor_library):
    """Both ways of reading keys; the second where the library can attend to lists of rows."""
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    if request.param == "lists":
        if not device.xp.has_ragged_attention:
            pytest.skip(f"{tensor_library} has no ragged attention")
        return device
    device.xp = TilesOnly(device.xp)
    return device


class TilesOnly:
    """The same library without ragged attention."""

    has_ragged_attention = False

    def __init__(self, xp):
        self._xp = xp

    def __getattr__(self, name):
        return getattr(self._xp, name)


def gqa(num_heads, num_kv_heads, head_dim=12, v_head_dim=12):
    return AttentionSpec(
        "gqa", num_heads, num_kv_heads, head_dim, v_head_dim, head_dim**-0.5, "float32"
    )


def mla(num_heads):
    return AttentionSpec(
        "mla", num_heads, 1, 20, 20, 0.3, "float32", kv_lora_rank=16, qk_rope_head_dim=4
    )


@dataclass
class Case:
    """A batch over a pool whose unused slots are NaN: reading one shows."""

    spec: AttentionSpec
    block_size: int
    seq_lens: list[int]
    query_lens: list[int]
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        counts = [-(-n // self.block_size) for n in self.seq_lens]
        order = rng.permutation(sum(counts) + 7)
        self.num_blocks = len(order)
        self.tables = np.zeros((len(counts), max(counts)), np.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[:count]
            order = order[count:]
        spec = self.spec
        wide = spec.num_kv_heads * self.num_blocks * self.block_size
        self.keys = rng.standard_normal((wide, spec.head_dim)).astype(np.float32)
        self.values = rng.standard_normal((wide, spec.v_head_dim)).astype(np.float32)
        self.starts = np.cumsum([0, *self.query_lens]).astype(np.int32)
        shape = (int(self.starts[-1]), spec.num_heads, spec.head_dim)
        self.q = rng.standard_normal(shape).astype(np.float32)
        self.sinks = rng.standard_normal(spec.num_heads).astype(np.float32)

    def slots(self, row):
        positions = np.arange(self.seq_lens[row])
        blocks = self.tables[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def first_needed(self, row):
        """The first token that the cache still has to hold for this step."""
        return self.spec.retention.first_needed(self.seq_lens[row] - self.query_lens[row])

    def pools(self):
        """Keys and values [slots, kv heads, dim], NaN where no sequence has a token that it still
        needs."""
        spec = self.spec
        used = np.zeros(self.num_blocks * self.block_size, bool)
        for row in range(len(self.seq_lens)):
            used[self.slots(row)[self.first_needed(row) :]] = True
        pools = []
        for pool in (self.keys, self.values)[: 1 if spec.kind == "mla" else 2]:
            pool = pool.reshape(len(used), spec.num_kv_heads, -1).copy()
            pool[~used] = np.nan
            pools.append(pool)
        return pools

    def expected(self):
        spec = self.spec
        pools = [p.astype(np.float64) for p in self.pools()]
        keys = pools[0]
        values = keys[..., : spec.kv_lora_rank] if spec.kind == "mla" else pools[1]
        group = spec.num_heads // spec.num_kv_heads
        out = np.zeros((len(self.q), spec.num_heads, values.shape[-1]))
        for row, (length, queries) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            slots = self.slots(row)
            for i in range(queries):
                at = length - queries + i
                seen = slots[spec.retention.first_needed(at) : at + 1]
                for head in range(spec.num_heads):
                    token = self.starts[row] + i
                    scores = keys[seen, head // group] @ self.q[token, head] * spec.scale
                    if spec.softcap:
                        scores = spec.softcap * np.tanh(scores / spec.softcap)
                    weights = np.exp(scores - scores.max())
                    total = weights.sum()
                    if spec.sinks:  # one more summand, which no value belongs to
                        total += np.exp(self.sinks[head] - scores.max())
                    mean = weights @ values[seen, head // group] / total
                    out[token, head] = mean
        return out.reshape(len(self.q), -1)

    def run(self, device, rows=None):
        """The driver's answer; with `rows`, for these rows only, in that order."""
        rows = list(range(len(self.seq_lens))) if rows is None else rows
        driver = ReferenceAttention(self.spec, self.block_size, device, None)
        shapes = driver.cache_shapes(self.num_blocks)
        cache = tuple(
            device.to_device(p.reshape(s)) for p, s in zip(self.pools(), shapes, strict=True)
        )
        tokens = [np.arange(self.starts[r], self.starts[r + 1]) for r in rows]
        lengths = [len(t) for t in tokens]
        q = self.q[np.concatenate(tokens)] if rows else self.q[:0]
        batch = AttentionBatch(
            num_seqs=len(rows),
            num_tokens=len(q),
            cu_seqlens_q=np.cumsum([0, *lengths]).astype(np.int32),
            seq_lens=np.array(self.seq_lens, np.int32)[rows],
            block_tables=self.tables[rows],
            cu_seqlens_q_dev=None,
            seq_lens_dev=None,
            block_tables_dev=None,
            slot_mapping=None,
            positions=None,
        )
        with device.xp.no_grad():
            metadata = driver.prepare(batch)
            own = {"sinks": device.to_device(self.sinks)} if self.spec.sinks else {}
            out = driver.forward(device.to_device(q), None, None, cache, metadata, **own)
            return np.array(device.to_host(out))


BATCHES = {
    "one token": ([1], [1]),
    "decodes of uneven lengths": ([1, 63, 64, 65, 130], [1] * 5),
    "one very long decode": ([700, 3, 5, 64, 2, 1], [1] * 6),
    "prefill": ([40], [40]),
    "prefill over a tile edge": ([150], [150]),
    "chunk after cached tokens": ([200], [30]),
    "decodes and chunks": ([90, 70, 20, 65, 129], [1, 33, 20, 1, 9]),
    "drafts to verify": ([90, 70, 6, 128], [4, 1, 6, 2]),
    "everything": ([5, 300, 40, 8, 64, 1], [5, 1, 12, 8, 3, 1]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
def test_attention_equals_a_loop(device, batch, block_size):
    case = Case(gqa(4, 2), block_size, *BATCHES[batch])
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "spec",
    [gqa(1, 1), gqa(3, 3), gqa(6, 2), gqa(8, 1), gqa(4, 4, 12, 8), mla(1), mla(5)],
    ids=lambda s: f"{s.kind}-{s.num_heads}-{s.num_kv_heads}-{s.v_head_dim}",
)
@pytest.mark.parametrize("batch", ["decodes and chunks", "drafts to verify"])
def test_head_ratios_and_kinds(device, spec, batch):
    case = Case(spec, 16, *BATCHES[batch])
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


KINDS = {
    "window": {"window": 40},
    "window of one": {"window": 1},
    "window over tiles": {"window": 130},
    "chunk": {"chunk": 50},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "window and sinks": {"window": 33, "sinks": True},
    "all at once": {"chunk": 48, "sinks": True, "softcap": 1.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [*BATCHES])
def test_layers_that_see_a_part_of_the_past_or_more_than_it(device, kind, batch):
    """What lies in front of a window is another sequence's: here NaN."""
    case = Case(replace(gqa(4, 2), **KINDS[kind]), 16, *BATCHES[batch])
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


def test_no_rows(device):
    case = Case(gqa(4, 2), 16, [5], [1])
    assert case.run(device, []).shape == (0, 48)
    assert Case(mla(3), 16, [5], [1]).run(device, []).shape == (0, 48)


def test_shared_blocks(device):
    """Two sequences with a common prefix read the same blocks."""
    case = Case(gqa(4, 2), 16, [50, 45, 64], [1, 13, 1])
    case.tables[1, :2] = case.tables[0, :2]
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


def test_a_row_does_not_depend_on_the_others(device):
    """Alone, in any order, beside anything: the same within rounding."""
    case = Case(gqa(4, 2), 16, *BATCHES["everything"])
    whole = np.split(case.run(device), case.starts[1:-1])
    for rows in ([0], [1], [3], [5], [5, 4, 3, 2, 1, 0], [1, 5], [2, 1, 4]):
        parts = np.split(case.run(device, rows), np.cumsum([case.query_lens[r] for r in rows])[:-1])
        for row, part in zip(rows, parts, strict=True):
            np.testing.assert_allclose(part, whole[row], rtol=1e-5, atol=1e-6)


def test_chunks_of_a_prompt_equal_the_whole(device):
    lengths = [150]
    whole = Case(gqa(4, 2), 16, lengths, lengths)
    expected = whole.run(device)
    for start, stop in ((0, 1), (0, 64), (64, 150), (149, 150), (100, 105)):
        part = Case(gqa(4, 2), 16, lengths, lengths)
        part.seq_lens, part.query_lens = [stop], [stop - start]
        part.q, part.starts = part.q[start:stop], np.array([0, stop - start], np.int32)
        np.testing.assert_allclose(part.run(device), expected[start:stop], rtol=1e-5, atol=1e-6)


def test_large_prompts_are_cut_to_bound_memory(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "MAX_CHUNK_SCORES", 4 * 200 * 16)
    case = Case(gqa(4, 2), 16, [200, 90], [200, 50])
    longs = attention_plan.plan_longs(
        AttentionBatch(
            2, 250, case.starts, np.array([200, 90]), case.tables, None, None, None, None, None
        ),
        attention_plan.Heads(4, 2, 16),
    )
    assert [chunk.num_queries for chunk in longs[0].chunks] == [16] * 12 + [8]
    assert longs[0].chunks[0].num_keys == 16 and longs[1].chunks[0].num_keys == 40 + 35
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


def test_uneven_groups_are_split_by_length(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "MAX_WASTE", 1)
    case = Case(gqa(4, 2), 16, [300, 3, 64, 65, 5, 129, 1], [1] * 7)
    parts = list(attention_plan._similar(np.arange(7), np.array(case.seq_lens), 4))
    assert len(parts) > 2 and sorted(np.concatenate(parts)) == list(range(7))
    np.testing.assert_allclose(case.run(device), case.expected(), rtol=1e-4, atol=2e-5)


def test_bfloat16_is_computed_in_float32(device):
    if "bfloat16" not in device.limits.dtypes:
        pytest.skip(f"{device.xp.name} multiplies no bfloat16 on a CPU")
    xp = device.xp
    case = Case(gqa(4, 2), 16, *BATCHES["decodes and chunks"])

    def through(array):
        return xp.to_numpy(xp.tensor(array).to(xp.bfloat16).to(xp.float32))

    case.q, case.keys, case.values = (through(a) for a in (case.q, case.keys, case.values))
    expected = case.expected()
    spec = AttentionSpec("gqa", 4, 2, 12, 12, 12**-0.5, "bfloat16")
    driver = ReferenceAttention(spec, 16, device, None)
    shapes = driver.cache_shapes(case.num_blocks)
    cache = tuple(
        xp.tensor(p.reshape(s)).to(xp.bfloat16) for p, s in zip(case.pools(), shapes, strict=True)
    )
    lens = np.array(case.seq_lens, np.int32)
    batch = AttentionBatch(
        5, len(case.q), case.starts, lens, case.tables, None, None, None, None, None
    )
    with xp.no_grad():
        q = xp.tensor(case.q).to(xp.bfloat16)
        out = driver.forward(q, None, None, cache, driver.prepare(batch))
    assert xp.dtype_name(out) == "bfloat16"
    np.testing.assert_allclose(xp.to_numpy(out.to(xp.float32)), expected, rtol=1e-2, atol=1e-3)
