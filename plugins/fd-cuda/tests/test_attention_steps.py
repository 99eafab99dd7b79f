"""What the conformance kit does not reach: rotation, cache writes, drafts, padding, replayed
plans."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import MIXED, Step, gqa, mla
from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.device import DeviceOptions

from fastdeploy_testing.drivers import lookup
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.latent.driver import LatentAttention
from fd_cuda.attention.plan import prompt_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def device() -> Any:
    opened = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    yield opened
    opened.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_mixed_steps_rotate_write_and_attend(device: Any, dtype: str, interleaved: bool) -> None:
    spec = gqa(dtype, interleaved=interleaved)
    step = Step(device, spec, MIXED, rotary_dim=32)
    step.check(PagedAttention(spec, 16, device, None), step.batch())


def test_partial_rotation_and_odd_widths(device: Any) -> None:
    spec = gqa("float32", 6, 2, 40)
    step = Step(device, spec, MIXED, rotary_dim=24, block_size=5)
    step.check(PagedAttention(spec, 5, device, None), step.batch())


@pytest.mark.parametrize("rotary_dim", [0, 24, 32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_normed_before_they_are_rotated(
    device: Any, rotary_dim: int, interleaved: bool
) -> None:
    spec = gqa("float32", interleaved=interleaved)
    step = Step(device, spec, MIXED, rotary_dim=rotary_dim, has_norms=True)
    step.check(PagedAttention(spec, 16, device, None), step.batch())


@pytest.mark.parametrize("same", [0, 1])
def test_normed_heads_of_128(device: Any, same: int) -> None:
    spec = gqa("float16", 4, 2, 128)
    rows = [(1, 40), (1, 1), (1, 0)] if same else [(1, 40), (20, 33)]
    step = Step(device, spec, rows, rotary_dim=128, has_norms=True)
    step.check(PagedAttention(spec, 16, device, None), step.batch(tokens_per_row=same))


KINDS = {
    "window": {"window": 24},
    "window of one": {"window": 1},
    "window of a block": {"window": 16},
    "chunk": {"chunk": 24},
    "chunk of a tile": {"chunk": 64},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 0.7},
    "gpt-oss": {"window": 37, "sinks": True},
    "gemma 2": {"window": 37, "softcap": 2.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [16, 5])
def test_bounded_and_capped_attention(device: Any, kind: str, block_size: int) -> None:
    """Prompts, chunks of prompts, decodes and drafts; blocks in front of a window are others'."""
    spec = dataclasses.replace(gqa("float32"), **KINDS[kind])
    step = Step(device, spec, MIXED, rotary_dim=32, block_size=block_size)
    step.check(PagedAttention(spec, block_size, device, None), step.batch())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 128])
def test_bounded_and_capped_decodes(device: Any, kind: str, width: int) -> None:
    spec = dataclasses.replace(gqa("bfloat16", 4, 1, width), **KINDS[kind])
    tokens = 1 + (width == 32)
    rows = [(tokens, n) for n in (tokens, 17, 64 + tokens, 200, 129)] + [(tokens, 0)]
    step = Step(device, spec, rows, rotary_dim=width)
    driver = PagedAttention(spec, 16, device, None)
    step.check(driver, step.batch(tokens_per_row=tokens, is_exact=False))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter minutes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_bounded_and_capped_long_contexts(device: Any, kind: str, width: int) -> None:
    """Several splits and tiles, the copy engine, blocks of 64."""
    more = {name: value * 13 if value in (24, 37) else value for name, value in KINDS[kind].items()}
    spec = dataclasses.replace(gqa("bfloat16", 8, 2, width), **more)
    decodes = [(1, n) for n in (4090, 1, 2048, 700, 313, 64, 65)]
    for rows, same in ((decodes, 1), ([(900, 900), (300, 3000), (1, 2000), (129, 450)], 0)):
        step = Step(device, spec, rows, rotary_dim=width, block_size=64)
        step.check(PagedAttention(spec, 64, device, None), step.batch(tokens_per_row=same))


@pytest.mark.parametrize("num_seqs", [3, 300])
def test_positions_may_differ_from_indices(device: Any, num_seqs: int) -> None:
    """Tokens after a picture: rotated at positions of their own, seen by their indices."""
    if DEVICE == "cpu" and num_seqs > 3:
        pytest.skip("takes the interpreter minutes")
    spec = dataclasses.replace(gqa("bfloat16", 8, 2, 128), offsets=True)
    rows = [(1, 40 + i % 77) for i in range(num_seqs)]
    step = Step(device, spec, rows, rotary_dim=128, offset=11)
    step.check(PagedAttention(spec, 16, device, None), step.batch(tokens_per_row=1))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_uniform_steps_with_drafts(device: Any, tokens: int, dtype: str) -> None:
    spec = gqa(dtype, 8, 2)
    rows = [(tokens, n) for n in (tokens, 17 + tokens, 64 + tokens, 200)] + [(tokens, 0)]
    step = Step(device, spec, rows, rotary_dim=32, padding=tokens // 4)
    driver = PagedAttention(spec, 16, device, None)
    step.check(driver, step.batch(tokens_per_row=tokens, is_exact=False))


def test_more_drafts_than_decodes_serve(device: Any) -> None:
    """Prompts' kernel computes them; what stands in slots of padding, which nobody has written, is
    NaN."""
    spec, tokens = gqa("float32", 64, 1), 4
    rows = [(tokens, n) for n in (tokens, 17 + tokens, 64 + tokens)] + [(tokens, 0)]
    step = Step(device, spec, rows, rotary_dim=32, padding=1)
    driver = PagedAttention(spec, 16, device, None)
    assert np.isfinite(step.check(driver, step.batch(tokens_per_row=tokens))).all()


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("heads", [(8, 1), (10, 2), (4, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_of_128(device: Any, tokens: int, heads: tuple[int, int], interleaved: bool) -> None:
    """The width that has a kernel of its own on a GPU."""
    spec = gqa("bfloat16" if tokens < 4 else "float16", *heads, 128, interleaved=interleaved)
    rows = [(tokens, n) for n in (tokens, 40, 129)] + [(tokens, 0)]
    step = Step(device, spec, rows, rotary_dim=128)
    step.check(PagedAttention(spec, 16, device, None), step.batch(tokens_per_row=tokens))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter minutes")
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("num_seqs", [1, 5, 70])
def test_long_contexts(device: Any, tokens: int, width: int, num_seqs: int) -> None:
    """Several splits, blocks of a cluster, warps of a block."""
    spec = gqa("bfloat16", 8, 1, width)
    lengths = [4090, tokens, 2048, 700, 0, 64, 65, 3000]
    rows = [(tokens, lengths[i % 8]) for i in range(num_seqs)]
    step = Step(device, spec, rows, rotary_dim=width, block_size=64)
    driver = PagedAttention(spec, 64, device, None)
    first = step.check(driver, step.batch(tokens_per_row=tokens, is_exact=False))
    for _ in range(3):
        again = step.check(driver, step.batch(tokens_per_row=tokens, is_exact=False))
        assert np.array_equal(first, again), "the same step gives other bits"


@pytest.mark.skipif(DEVICE == "cpu", reason="a processor has no graphs")
def test_replays_follow_the_lengths_on_the_device(device: Any) -> None:
    """Planned inside the graph: lengths and tables of the replay count, not those of the
    capture."""
    spec = gqa("bfloat16", 16, 2, 128)
    driver = PagedAttention(spec, 64, device, None)
    steps = [
        Step(device, spec, [(1, n) for n in lengths], rotary_dim=128, block_size=64, seed=seed)
        for seed, lengths in enumerate(([4000, 3, 900, 64], [5, 4000, 64, 1], [1, 1, 0, 2500]))
    ]
    steps[0].check(driver, steps[0].batch(tokens_per_row=1, is_exact=False))  # compiles
    batch = steps[0].batch(tokens_per_row=1, is_exact=False)
    blocks = max(s.old_k.shape[0] for s in steps) // 64
    cache = tuple(
        torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in driver.cache_shapes(blocks)
    )
    width = max(s.tables.shape[1] for s in steps)
    batch.block_tables = np.zeros((4, width), np.int32)
    batch.block_tables_dev = torch.zeros((4, width), dtype=torch.int32, device="cuda")
    qkv, table = steps[0].qkv.cuda(), torch.zeros_like(steps[0].rotary).cuda()
    q, k, v = (
        torch.as_strided(qkv, x.shape, x.stride(), x.storage_offset())
        for x in (steps[0].q, steps[0].k, steps[0].v)
    )
    results = []

    def run() -> None:
        results.append(driver.forward(q, k, v, cache, driver.prepare(batch), table))

    graph = device.capture(run)
    for step in (*steps, steps[0]):
        own = step.batch(tokens_per_row=1)
        for name in ("seq_lens_dev", "slot_mapping", "positions"):
            getattr(batch, name).copy_(getattr(own, name))
        batch.block_tables_dev.zero_()
        batch.block_tables_dev[:, : step.tables.shape[1]].copy_(own.block_tables_dev)
        qkv.copy_(step.qkv)
        table.copy_(step.rotary)
        for new, old in zip(cache, (step.old_k, step.old_v), strict=True):
            new.fill_(float("nan"))
            new.view(-1, *old.shape[1:])[: old.shape[0]].copy_(old)
        results[0].fill_(float("nan"))
        graph.replay()
        got = results[0].float().cpu().numpy()
        for row, expected in enumerate(step.expected()):
            if step.rows[row][1]:
                assert np.abs(got[row] - expected[0]).max() <= 3e-2 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("tokens", [1, 3])
def test_uniform_latent_steps(device: Any, tokens: int) -> None:
    spec = mla("float32")
    rows = [(tokens, n) for n in (tokens, 60, 130)] + [(tokens, 0)]
    step = Step(device, spec, rows)
    driver = LatentAttention(spec, 16, device, None)
    step.check(driver, step.batch(tokens_per_row=tokens, is_exact=False))


@pytest.mark.parametrize("heads", [(4, 2), (8, 1)])
def test_mixed_steps_that_only_the_device_knows(device: Any, heads: tuple[int, int]) -> None:
    spec = gqa("float32", *heads)
    rows = [*MIXED, (0, 5), (0, 0)]
    step = Step(device, spec, rows, rotary_dim=32)
    batch = step.batch(is_exact=False)
    batch.cu_seqlens_q = np.array([0] + [batch.num_tokens] * len(rows), np.int32)
    driver = PagedAttention(spec, 16, device, None)
    step.check(driver, batch)
    # Padding after the last row: finite for any content.
    batch.num_tokens += 5
    for name in ("q", "k", "v"):
        own = getattr(step, name)
        padding = torch.full((5, *own.shape[1:]), float("nan"), dtype=own.dtype)
        setattr(step, name, torch.cat((own, padding)))
    q, k, v = (getattr(step, name).to(device.device) for name in ("q", "k", "v"))
    put = device.to_device
    batch.positions = torch.cat((batch.positions, put(np.zeros(5, np.int64))))
    batch.slot_mapping = torch.cat((batch.slot_mapping, put(np.full(5, -1))))
    shapes = driver.cache_shapes(step.old_k.shape[0] // step.block_size)
    olds = (step.old_k, step.old_v)
    cache = tuple(c.reshape(s).to(device.device) for c, s in zip(olds, shapes, strict=True))
    assert step.rotary is not None
    rotary = step.rotary.to(device.device)
    out = driver.forward(q, k, v, cache, driver.prepare(batch), rotary)
    assert torch.isfinite(out).all() and not out[-5:].any()


def test_mixed_latent_steps(device: Any) -> None:
    spec = mla("float32")
    step = Step(device, spec, MIXED)
    step.check(LatentAttention(spec, 16, device, None), step.batch())


@pytest.mark.parametrize("num_seqs", [1, 2, 5])
def test_invariant_rows_do_not_depend_on_the_batch(
    device: Any, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_BATCH_INVARIANT", "1")
    spec = gqa("bfloat16", 8, 2)
    rows = [(1, 300), (1, 40), (1, 129), (1, 500), (1, 7)]
    crowd = Step(device, spec, rows, rotary_dim=32)
    driver = PagedAttention(spec, 16, device, None)
    everybody = crowd.check(driver, crowd.batch(tokens_per_row=1))
    part = Step(device, spec, rows, rotary_dim=32)
    batch = part.batch(tokens_per_row=1)
    batch.num_seqs = batch.num_tokens = num_seqs
    batch.cu_seqlens_q = batch.cu_seqlens_q[: num_seqs + 1]
    part.qkv = part.qkv[:num_seqs]
    part.q, part.k, part.v = part.q[:num_seqs], part.k[:num_seqs], part.v[:num_seqs]
    got, _ = part.run(driver, batch)
    assert np.array_equal(got, everybody[:num_seqs])


def test_long_row_among_short_ones_is_split(device: Any) -> None:
    """The plan gives a long row many programs and leaves none empty."""
    from fd_cuda.attention.plan import NUM_SPLITS, ROW, TILE_BEGIN, TILE_END, decode_items
    from fd_cuda.attention.tuning import Gpu, Sizes

    shape = Sizes(Gpu(132, True)).decode(64, 2, 16, 128, 2)
    lengths = np.full(64, 1000, np.int32)
    lengths[7] = 32768
    lengths[9] = 0
    put = device.to_device
    items, counters = decode_items(
        put(lengths), put(np.arange(65, dtype=np.int32)), 64, 128, 1, shape,
        new_in_cache=False,
    )  # fmt: skip
    host = items.cpu().numpy()
    host = host[host[:, ROW] >= 0]
    assert counters.cpu().numpy().tolist() == [0] * 128
    sizes = host[:, TILE_END] - host[:, TILE_BEGIN]
    for row in range(64):
        mine = host[host[:, ROW] == row]
        tiles = max(1, -(-max(int(lengths[row]) - 1, 0) // shape.tile))
        assert len(mine) == mine[0, NUM_SPLITS]
        assert mine[0, TILE_BEGIN] == 0 and mine[-1, TILE_END] == tiles
        assert (mine[1:, TILE_BEGIN] == mine[:-1, TILE_END]).all()
    assert (sizes > 0).all()
    total = sizes.sum()
    assert sizes.max() <= max(-(-total // shape.target), -(-512 * 64 // shape.tile // 32)) + 1


@pytest.mark.parametrize(
    ("num_seqs", "heads", "is_alone", "streams"),
    [(256, 2, True, True), (64, 8, True, True), (256, 2, False, False), (64, 2, True, False),
     (256, 8, True, False)],
)  # fmt: skip
def test_streams_serve_as_many_rows_as_there_are_places(
    num_seqs: int, heads: int, is_alone: bool, streams: bool
) -> None:
    from fd_cuda.attention.plan import StreamShape
    from fd_cuda.attention.tuning import Gpu, Sizes

    chosen = Sizes(Gpu(132, True)).native(num_seqs, heads, 8, is_alone)
    assert isinstance(chosen, StreamShape) == streams
    if isinstance(chosen, StreamShape):
        assert chosen.num_blocks == num_seqs * heads


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [8, 16, 32])
def test_blocks_of_few_rows_fit_beside_each_other(heads: int, columns: int) -> None:
    """Where rows are not cut; a second round of blocks would take as long as the first."""
    from fd_cuda.attention.tuning import Gpu, Sizes

    for num_seqs in range(1, 132 // heads + 1):
        shape = Sizes(Gpu(132, True)).native(num_seqs, heads, columns, True)
        assert num_seqs * heads * shape.cluster <= 132 * shape.occupancy, num_seqs


@pytest.mark.parametrize(("num_seqs", "heads", "most"), [(64, 2, 1), (256, 2, 2), (100, 4, 2)])
def test_streams_share_all_tiles_equally(device: Any, num_seqs: int, heads: int, most: int) -> None:
    """Rows of one length: shares are whole rows and heads, or the same fraction of each."""
    from fd_cuda.attention.plan import StreamShape, stream_items
    from fd_cuda.attention.tuning import stream_blocks

    shape = StreamShape(32, 4, 1, 3, 2, stream_blocks(num_seqs * heads, 264))
    put, rows = device.to_device, np.arange(num_seqs + 1, dtype=np.int32)
    lengths = np.full(num_seqs, 1101, np.int32)
    items, counters = stream_items(put(lengths), put(rows), num_seqs, heads, 1, shape)
    assert not counters.cpu().numpy().any()
    host, tiles = items.cpu().numpy(), -(-1100 // shape.tile)
    shares, of_rows = host[: shape.num_blocks], host[shape.num_blocks :]
    begins, ends = shares[:, 1], shares[:, 2]
    assert begins[0] == 0 and ends[-1] == num_seqs * heads * tiles == shares[0, 3]
    assert (begins[1:] == ends[:-1]).all() and np.ptp(ends - begins) <= 1
    assert (shares[:, 0] == begins // (tiles * heads)).all()
    assert shape.num_blocks >= 132
    cuts = np.diff(np.concatenate(([0], np.flatnonzero(begins % tiles == 0), [len(begins)])))
    assert cuts.max() <= 2 and ((ends - begins).max() <= most * tiles)
    assert (of_rows[:, 0] == np.arange(num_seqs) * tiles).all() and (of_rows[:, 1] == tiles).all()
    assert (of_rows[:, 2] == 1100).all() and (of_rows[:, 3] == rows[:-1]).all()


@pytest.mark.parametrize("longest", [1101, 1901])
def test_streams_of_rows_that_stand_in(device: Any, longest: int) -> None:
    """Whole rows to a block where lengths are alike; else no block gets all short ones."""
    from fd_cuda.attention.plan import StreamShape, stream_items

    lengths = np.full(224, 1101, np.int32)
    lengths[100:115], lengths[7] = 0, longest
    put, rows = device.to_device, np.arange(225, dtype=np.int32)
    items, _ = stream_items(put(lengths), put(rows), 224, 2, 1, StreamShape(32, 2, 1, 3, 4, 448))
    host = items.cpu().numpy()
    (shares, of_rows), is_alike = np.split(host, [448]), longest == 1101
    firsts = (of_rows[:, :1] * 2 + of_rows[:, 1:2] * np.arange(2)).ravel()
    assert shares[0, 1] == 0 and (shares[1:, 1] == shares[:-1, 2]).all()
    assert np.array_equal(shares[:, 1], firsts) == is_alike == (shares[0, 3] == 0)
    assert (shares[:, 0] == (np.searchsorted(firsts, shares[:, 1], "right") - 1) // 2).all()
    begun = np.searchsorted(firsts, shares[:, 2]) - np.searchsorted(firsts, shares[:, 1])
    assert begun.sum() == 448 and begun.max() <= (1 if is_alike else 9)


@pytest.mark.parametrize("shortest", [0, 1, 2])
@pytest.mark.parametrize("tokens", [8, 25, 64])
@pytest.mark.parametrize("is_exact", [False, True])
def test_tiles_of_prompts(tokens: int, shortest: int, is_exact: bool) -> None:
    """Every row of more tokens is there, the longest first, but for what is no whole tile; as items
    they say the same."""
    rng = np.random.default_rng(tokens)
    fed = rng.choice([0, 1, 2, 9, 64, 130, 299], 40)
    context = rng.choice([0, 0, 5, 64, 1999], 40)
    starts, lengths = np.cumsum([0, *fed]).astype(np.int32), (fed + context).astype(np.int32)
    batch: Any = SimpleNamespace(num_seqs=40, num_tokens=int(starts[-1]), is_exact=is_exact)
    batch.cu_seqlens_q = starts
    batch.seq_lens_dev = torch.from_numpy(lengths).to(DEVICE)
    batch.cu_seqlens_q_dev = torch.from_numpy(starts).to(DEVICE)
    found = prompt_tiles(batch, shortest, tokens).cpu().numpy()[:, :5]
    real = found[found[:, 3] > 0]
    assert not found[len(real) :, 3].any() and (len(real) == len(found) or not is_exact)
    meant = [
        (row, begin, starts[row], fed[row], context[row])
        for row in np.flatnonzero(fed > shortest)
        for begin in range(0, fed[row], tokens)
    ]
    assert sorted(map(tuple, real)) == meant
    assert (np.diff(real[:, 4] // tokens + real[:, 1] // tokens) <= 0).all()
    items = prompt_tiles(batch, shortest, tokens, 32).cpu().numpy()
    assert (items[len(real) :, 0] == -1).all()
    for item, (row, begin, first, own, before) in zip(items, real, strict=False):
        count = min(tokens, own - begin)
        end = before + begin + count
        assert item.tolist() == [row, 0, -(-end // 32), 0, 1, end, first + begin, count]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_kernels_compile_for_architectures(capability: int) -> None:
    """Real compilation, which is stricter than the interpreter, and shared memory as the card has
    it; no GPU is needed for it."""
    script = Path(__file__).with_name("compile_only.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script, str(capability)],
        capture_output=True, text=True, env=environment, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]).keys() == {
        "_align", "_finish", "_grouped", "_rms_norm", "_sums",
        "clear_padding", "convolve", "cut_decodes", "cut_prompts", "cut_stream",
        "decode_attention", "latent_attention", "one_shot_sum", "packed_product",
        "prefill_attention", "rotate_and_write", "scan_chunks", "step_states", "sum_decays",
        "within_chunks",
        *(["packed_attention"] if capability == 90 else []),
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["plain", "latent", *(["gpt-oss", "chunk"] if DEVICE == "cuda" else [])]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if DEVICE == "cuda" else ["float32"])
def test_a_token_is_the_same_however_it_is_fed(
    device: Any, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prompt, after a part of one, among others, alone, in a captured step: bit for bit."""
    monkeypatch.setenv("FD_BATCH_INVARIANT", "1")
    length, block_size, is_latent = 70, 16, kind == "latent"
    spec = mla(dtype) if is_latent else dataclasses.replace(gqa(dtype, 8, 2), **KINDS.get(kind, {}))
    rotary_dim = 0 if is_latent else 32
    whole = Step(device, spec, [(length, length)], rotary_dim=rotary_dim, block_size=block_size)
    driver = (LatentAttention if is_latent else PagedAttention)(spec, block_size, device, None)
    together = whole.check(driver, whole.batch())
    _, caches = whole.run(driver, whole.batch())
    shapes = driver.cache_shapes(whole.old_k.shape[0] // block_size)
    cache = tuple(
        torch.from_numpy(c).to(whole.dtype).reshape(s).to(device.device)
        for c, s in zip(caches, shapes, strict=True)
    )
    inputs = [getattr(whole, name).to(device.device) for name in ("q", "k", "v")]
    rotary, sinks = (
        None if x is None else x.to(device.device) for x in (whole.rotary, whole.sinks)
    )

    def again(*rows: tuple[int, int], tokens_per_row: int = 0) -> None:
        tokens = [token for count, end in rows for token in range(end - count, end)]
        part = AttentionBatch.upload(
            device.to_device, np.cumsum([0, *(count for count, _ in rows)]),
            [end for _, end in rows], np.repeat(whole.tables, len(rows), 0),
            [whole.slot(0, token) for token in tokens], tokens, tokens_per_row,
        )  # fmt: skip
        part = dataclasses.replace(part, is_exact=not tokens_per_row)
        more = {} if sinks is None else {"sinks": sinks}
        own = [x[tokens] for x in inputs]
        out = driver.forward(*own, cache, driver.prepare(part), rotary, **more)
        assert np.array_equal(out.float().cpu().numpy(), together[tokens]), rows

    again((30, length))
    again((3, 20), (1, 64), (1, 1))
    again((1, 69), (1, 33), tokens_per_row=1)
    again((4, 68), (4, 33), tokens_per_row=4)
