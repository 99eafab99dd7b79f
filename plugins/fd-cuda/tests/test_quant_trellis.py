"""The trellis code's CUDA C++ kernels against a decoder that goes bit by bit: emulated, or on the
GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import packed_weights
import pytest
import torch
from fastdeploy_core.contracts.quant_formats import PackedWeight
from quant_emulation import use_kernels

from fd_cuda.kernels import quant_grouped, quant_linear, quant_trellis
from fd_cuda.kernels.quant_layout import TRELLIS
from fd_cuda.kernels.quant_shapes import (
    MOST_DYNAMIC,
    MOST_SHARED,
    Grouped,
    Tile,
    grouped_shared,
    tile_shared,
)
from fd_cuda.kernels.routing import Order
from fd_cuda.kernels.trellis_native import TURN, Gemv, Trellis, rotated

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
# Activations are rounded to int8, twice where there are experts, and so few inputs average little.
TOLERANCE = 2.5e-2


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)
    if not HAS_GPU:
        monkeypatch.setattr(quant_trellis, "native_runs", lambda x: True)


def decoded(words: np.ndarray) -> np.ndarray:
    """[N, K] of int32 [N / 64, K / 8, 32]: every state from the ring's bits, every byte from the
    product."""
    tall, wide, _ = words.shape
    rings = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    symbols, bits = np.arange(256)[:, None], np.arange(16)
    windows = rings[..., (4 * symbols + 4 - 16 + bits) % 1024].astype(np.int64)
    p = (windows << bits).sum(-1) * 0x67EDF2EB & 0xFFFFFFFF
    b = [(p >> 8 * n & 255) - 127.5 for n in range(4)]
    pairs = np.stack((b[0] + b[1] - b[3], b[1] + b[2] + b[3]), -1)
    # Four symbols are eight inputs of an output.
    out = pairs.reshape(tall, wide, 64, 8).transpose(0, 2, 1, 3).reshape(tall * 64, wide * 8)
    return out * 1.03 / 128


def trellis(rows: int, count: int, block: int, num_experts: int = 0) -> tuple[Trellis, np.ndarray]:
    """(the weight, the same in full precision: [E, N, K] in the space of unrotated inputs)."""
    rng = np.random.default_rng(rows + count)
    many = max(1, num_experts)
    words = rng.integers(-(2**31), 2**31, (many, rows // 64, count // 8, 32)).astype(np.int32)
    scale = rng.uniform(0.5, 1.5, (many, rows)).astype(np.float16)
    signs = rng.choice(np.array([-1, 1], np.int8), count)
    butterfly = np.ones((1, 1))
    while len(butterfly) < block:
        butterfly = np.block([[butterfly, butterfly], [butterfly, -butterfly]])
    rotation = np.kron(np.eye(count // block), butterfly) / block**0.5 * signs
    dense = np.stack([decoded(w) for w in words]) * scale[..., None].astype(np.float64) @ rotation
    held = {
        "weight": torch.from_numpy(words).to(DEVICE),
        "scale": torch.from_numpy(scale).to(DEVICE),
        "signs": torch.from_numpy(np.tile(signs, (many, 1))).to(DEVICE),
        "block": torch.full((many, 1), block, dtype=torch.int32, device=DEVICE),
    }
    if not num_experts:
        held = {key: tensor[0] for key, tensor in held.items()}
    packed = PackedWeight(packed_weights.TRELLIS, rows, count, held, num_experts)
    return quant_trellis.prepare(packed), dense


def check(got: torch.Tensor, expected: np.ndarray) -> None:
    error = np.linalg.norm(got.double().cpu().numpy() - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE, f"off by {error:.2g}"


@pytest.mark.parametrize("levels", [0, 1, 3, 5, 8, 10, 13])
def test_rotation(levels: int) -> None:
    """Signs and transforms as matrix products, one level after another."""
    width = 3 << max(levels, 5)
    signs = torch.randint(0, 2, (width,), device=DEVICE).mul_(2).sub_(1).to(torch.int8)
    weight = replace(trellis(64, 128, 128)[0], signs=signs, block=1 << levels)
    x = torch.randn(2, width, device=DEVICE).bfloat16()
    expected, size = x.double() * signs, 1
    while size < weight.block:
        pairs = expected.view(2, -1, 2, size)
        expected = torch.stack(
            (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2
        )
        size *= 2
    expected = expected.reshape(2, width) / weight.block**0.5
    check(rotated(x, weight), expected.cpu().numpy())


@pytest.mark.parametrize(
    ("rows", "count", "block", "tokens", "dtype"),
    [
        (128, 128, 128, 3, torch.bfloat16),
        (64, 384, 128, 13, torch.float16),
        (64, 512, 256, 1, torch.bfloat16),
        (128, 256, 256, 100, torch.bfloat16),
    ],
)
def test_product(rows: int, count: int, block: int, tokens: int, dtype: torch.dtype) -> None:
    weight, dense = trellis(rows, count, block)
    x = torch.randn(tokens, count + 8, device=DEVICE).to(dtype)[:, :count]
    bias = torch.randn(rows, device=DEVICE).to(dtype)
    wide = x.double().cpu().numpy()
    expected = wide @ dense[0].T + bias.double().cpu().numpy()
    check(quant_trellis.linear(x, weight, bias), expected)


@pytest.mark.parametrize(
    ("shape", "count", "block", "tokens"),
    [
        (Gemv(4, 3, 1, rotates=True), 2560, 512, 1),  # ten spans
        (Gemv(2, 1, 1, rotates=True), 160, 32, 1),
        (Gemv(8, 4, 1, rotates=True), 128, 128, 1),  # warps without inputs
        (Gemv(2, 2, 1, split=2, rotates=True), 2560, 512, 1),
        (Gemv(6, 2, 2, tiles=3), 384, 128, 8),
        (Gemv(2, 4, 2), 160, 32, 3),
        (Gemv(2, 2, 1, rows=16, split=4), 384, 128, 13),
        (Gemv(8, 2, 1, rows=16, split=2), 128, 128, 9),
        (Gemv(2, 2, 1, rows=32, split=2), 384, 128, 33),  # two blocks of rows
    ],
)
def test_kernels_of_dense_layers(shape: Gemv, count: int, block: int, tokens: int) -> None:
    weight, dense = trellis(192, count, block)
    x = torch.randn(tokens, count, device=DEVICE).bfloat16()
    check(quant_trellis.by_shape(shape, x, weight, None), x.double().cpu().numpy() @ dense[0].T)


@pytest.mark.parametrize(
    ("shape", "rows", "count", "tokens"),
    [
        (Tile(64, 128, 2, 4, 4, 2, 2), 192, 448, 70),  # half of a block is after the outputs
        (Tile(64, 64, 1, 4, 4, 4, 1), 64, 64, 9),
        *([(Tile(256, 128, 2, 4, 4, 2, 2), 1024, 2048, 300)] if HAS_GPU else []),
    ],
)
def test_tiles_of_dense_layers(shape: Tile, rows: int, count: int, tokens: int) -> None:
    weight, dense = trellis(rows, count, 64)
    x = torch.randn(tokens, count, device=DEVICE).bfloat16()
    bias = torch.randn(rows, device=DEVICE).bfloat16()
    expected = x.double().cpu().numpy() @ dense[0].T + bias.double().cpu().numpy()
    check(quant_trellis.by_shape(shape, x, weight, bias), expected)


@pytest.mark.parametrize("rows", [1, 5, 16, 30, 64, 128, 300, 3000])
def test_chosen_kernels_fit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into shared memory, and blocks that divide K have turns alike."""
    for room in (quant_trellis, quant_linear):
        monkeypatch.setattr(room, "num_processors", lambda: 132)
    weight = trellis(64, 128, 128)[0]
    for width, depth in ((8192, 28672), (8192, 8192), (6144, 1024), (1024, 3072), (64, 128)):
        words = torch.empty((width // 64, depth // 8, 0))
        packed = replace(weight.packed, out_features=width, in_features=depth)
        shape = quant_trellis.choose(replace(weight, packed=packed, words=words), rows)
        if shape is None:
            assert rows > 128
            continue
        if isinstance(shape, Tile):
            assert tile_shared(shape, TRELLIS, 0) <= MOST_SHARED
            continue
        assert shape.shared(depth) <= MOST_DYNAMIC
        assert depth // TURN % shape.split == 0
        assert shape.rotates == (rows == 1)


@pytest.mark.parametrize(
    ("rows", "split", "rotates"), [(4, 1, True), (8, 2, False), (16, 1, False)]
)
def test_single_rows_of_experts(
    rows: int, split: int, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks rotate their row themselves; those that leave half of a GPU idle divide K."""
    monkeypatch.setattr(quant_trellis, "num_processors", lambda: 132)
    weight = trellis(64, 128, 128)[0]
    packed = replace(weight.packed, out_features=7168, in_features=8192)
    weight = replace(weight, packed=packed, words=torch.empty((112, 1024, 0)))
    shape = quant_trellis.choose_experts(weight, rows, paired=True, alone=True)
    assert (shape.split, shape.rotates) == (split, rotates)
    assert quant_trellis.choose_experts(weight, rows, paired=False, alone=True).rotates


def test_blocks_of_experts_fit() -> None:
    """Into shared memory with some steps ahead, and most experts have one as long as there are
    blocks so large."""
    for each in range(1, 600):
        shape, decodes = quant_trellis.choose_grouped(each)
        assert grouped_shared(shape, TRELLIS, is_int8=decodes) <= MOST_DYNAMIC
        assert shape.stages > 3
        assert each + each**0.5 <= shape.rows or shape.rows == 128
        assert decodes or shape.rows == 32


def test_stored_words_come_back() -> None:
    """Lanes' order is exchanged for the format's, in which the decoder goes bit by bit."""
    weight, dense = trellis(64, 128, 128)
    words = weight.stored.tensors["weight"]
    assert not torch.equal(words, weight.words)
    own = decoded(words.cpu().numpy()) * weight.scales.double().cpu().numpy()[:, None]
    assert np.allclose(np.linalg.norm(own, axis=1), np.linalg.norm(dense[0], axis=1))
    assert torch.equal(quant_trellis.prepare(weight.stored).words, weight.words)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter is other tests' business."""

    def combined(y: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return (y.view(*shares.shape, -1).float() * shares.unsqueeze(-1)).sum(1).to(y.dtype)

    def order(ids: torch.Tensor, num_experts: int, rows: int) -> Order:
        slots, blocks = [], []
        for expert in range(num_experts):
            own = torch.nonzero(ids.reshape(-1) == expert)[:, 0].tolist()
            for begin in range(0, len(own), rows):
                part = own[begin : begin + rows]
                slots += part + [ids.numel()] * (rows - len(part))
                blocks.append(expert)
        places = torch.full((ids.numel() + 1,), -1, dtype=torch.int32)
        places[slots] = torch.arange(len(slots), dtype=torch.int32)
        return Order(
            torch.tensor(slots + [ids.numel()] * rows, dtype=torch.int32),
            torch.tensor([*blocks, -1], dtype=torch.int32),
            places[:-1].contiguous(),
        )

    monkeypatch.setattr(quant_trellis, "combined", combined)
    monkeypatch.setattr(quant_trellis, "order_by_expert", order)


@pytest.mark.parametrize(
    ("tokens", "tiles", "split", "rotates"),
    [(1, 1, 1, True), (1, 1, 2, True), (1, 2, 2, False), (2, 2, 1, False), (3, 1, 1, False)],
)
def test_experts(
    tokens: int, tiles: int, split: int, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one row up to two tokens, then of eight."""

    def choose(weight: Trellis, rows: int, *, paired: bool, alone: bool) -> Gemv:
        return Gemv(4, 2, 1, 2 if paired else tiles, split=split, rotates=rotates)

    monkeypatch.setattr(quant_trellis, "choose_experts", choose)
    hidden, inner, count = 128, 128, 3
    (gate_up, first), (down, second) = (
        trellis(2 * inner, hidden, 128, count),
        trellis(hidden, inner, 128, count),
    )
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]], device=DEVICE)[:tokens]
    shares = torch.rand(tokens, 2, device=DEVICE)
    if not HAS_GPU:
        without_triton(monkeypatch)
    got = quant_trellis.moe_experts(x, ids, shares, gate_up, down)
    expected = np.zeros((tokens, hidden))
    for token in range(tokens):
        for nth in range(2):
            expert = int(ids[token, nth])
            gate, up = np.split(first[expert] @ x[token].double().cpu().numpy(), 2)
            inside = gate / (1 + np.exp(-gate)) * up
            expected[token] += float(shares[token, nth]) * (second[expert] @ inside)
    check(got, expected)


@pytest.mark.parametrize(
    ("tokens", "rows", "decodes"),
    [
        (40, 64, False),  # two thirds of them each
        (40, 64, True),
        (40, 32, False),
        *([(90, 128, False), (150, 128, True)] if HAS_GPU else []),
    ],
)
def test_experts_of_many_rows(
    tokens: int, rows: int, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Grouped(rows, 2, 3, 4 if rows == 32 else 2), decodes
    monkeypatch.setattr(quant_trellis, "choose_grouped", lambda each: chosen)
    monkeypatch.setattr(quant_grouped, "num_processors", lambda: 3)
    hidden, inner, count = 256, 192, 3
    gate_up, first = trellis(2 * inner, hidden, 128, count)
    down, second = trellis(hidden, inner, 64, count)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.rand(tokens, count, device=DEVICE).topk(2, -1)[1]
    shares = torch.rand(tokens, 2, device=DEVICE)
    if not HAS_GPU:
        without_triton(monkeypatch)
    got = quant_trellis.moe_experts(x, ids, shares, gate_up, down)
    wide, expected = x.double().cpu().numpy(), np.zeros((tokens, hidden))
    for token in range(tokens):
        for nth in range(2):
            expert = int(ids[token, nth])
            gate, up = np.split(first[expert] @ wide[token], 2)
            inside = gate / (1 + np.exp(-gate)) * up
            expected[token] += float(shares[token, nth]) * (second[expert] @ inside)
    check(got, expected)


def test_rows_do_not_depend_on_each_other() -> None:
    weight, _ = trellis(64, 256, 128)
    x = torch.randn(9, 256, device=DEVICE).bfloat16()
    crowd = quant_trellis.linear(x, weight, None)
    assert torch.equal(quant_trellis.linear(x[:2], weight, None), crowd[:2])
