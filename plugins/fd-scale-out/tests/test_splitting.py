"""Blocks between instances with different numbers of ranks, against slices of whole tensors."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import numpy as np
import pytest
from fd_scale_out.handover.splitting import Layout, Staging, divide

from fastdeploy_core.errors import CapabilityError

BLOCKS, BLOCK_SIZE, DIM = 5, 4, 6
RANKS = (1, 2, 4, 8)


def heads_of(num_heads: int, ranks: int, rank: int) -> slice:
    """As layers/attention.py cuts keys and values: a share of the heads, or one that several
    ranks have."""
    count = min(ranks, num_heads)  # pieces
    piece = rank * count // ranks
    return slice(piece * num_heads // count, (piece + 1) * num_heads // count)


class Engine:
    """The host tiers of an engine's ranks, filled with whole tensors cut by the model's rule."""

    def __init__(self, ranks: int, num_heads: int, kind: str, wholes: list[np.ndarray]) -> None:
        self.num_heads, self.axis = num_heads, 2 if kind == "HND" else 3
        shapes = []
        for whole in wholes:
            shape = list(whole.shape[2:])
            if kind != "latent":
                share = heads_of(num_heads, ranks, 0)
                shape[self.axis - 2] = share.stop - share.start
            name = {"uint16": "bfloat16", "uint8": "int8"}.get(str(whole.dtype), str(whole.dtype))
            shapes.append(((1, *shape), name))
        # two layers
        self.layout = Layout(ranks, num_heads, (tuple(shapes), tuple(shapes)))
        dtype = self.layout.block
        self.bytes = [bytearray(BLOCKS * dtype.itemsize) for _ in range(ranks)]
        self.blocks = [np.frombuffer(one, dtype) for one in self.bytes]
        self.ranks = [(memoryview(one), dtype.itemsize) for one in self.bytes]
        self.kind = kind

    def fill(self, wholes: list[np.ndarray]) -> Engine:
        for rank, blocks in enumerate(self.blocks):
            for layer, (m, whole) in itertools.product(range(2), enumerate(wholes)):
                at: list[Any] = [slice(None)] * whole[layer].ndim
                if self.kind != "latent":
                    share = heads_of(self.num_heads, self.layout.num_ranks, rank)
                    at[self.axis - 1] = share
                blocks[f"{layer} {m}"][:] = whole[layer][tuple(at)]
        return self


def wholes_of(kind: str, num_heads: int) -> list[np.ndarray]:
    """Keys, values and scales of two layers, [layer, block, ...], of all heads; or latent rows."""
    rng = np.random.default_rng(num_heads)
    if kind == "latent":
        shapes: list[tuple[tuple[int, ...], str]] = [((BLOCK_SIZE, 1, DIM), "uint16")]
    elif kind == "HND":
        shapes = [((num_heads, BLOCK_SIZE, DIM), "uint16")] * 2
    else:
        numbers, scales = (BLOCK_SIZE, num_heads, DIM), (BLOCK_SIZE, num_heads, 1)
        shapes = [(numbers, "uint8"), (numbers, "uint8"), (scales, "float32"), (scales, "float32")]
    return [rng.integers(0, 250, (2, BLOCKS, *shape)).astype(dtype) for shape, dtype in shapes]


@pytest.mark.parametrize("kind", ["NHD", "HND", "latent"])
@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16])
def test_every_rank_gets_its_heads(kind: str, num_heads: int) -> None:
    wholes = wholes_of(kind, num_heads)
    for theirs, ours in itertools.product(RANKS, RANKS):
        source = Engine(theirs, num_heads, kind, wholes).fill(wholes)
        target = Engine(ours, num_heads, kind, wholes)
        expected = Engine(ours, num_heads, kind, wholes).fill(wholes)
        staging = Staging(source.layout, target.layout, target.ranks)
        for block in (3, 0):
            for (view, size), came in zip(staging.ranks, source.bytes, strict=True):
                part = slice(block * size, (block + 1) * size)
                view[part] = came[part]
            staging.move(block)
            staging.free(block)
        for found, wanted in zip(target.blocks, expected.blocks, strict=True):
            for block in range(BLOCKS):
                same = wanted[block] if block in (0, 3) else np.zeros_like(wanted[block])
                assert found[block] == same, (theirs, ours, block)


def test_layouts_that_are_not_of_one_model_are_refused() -> None:
    def layout(ranks: int, *shapes: tuple[tuple[int, ...], str], heads: int = 8) -> Layout:
        return Layout(ranks, heads, (shapes,))

    own = layout(2, ((1, 4, 4, 6), "bfloat16"))
    for other in (
        Layout(2, 8, ()),
        layout(2, ((1, 4, 4, 6), "bfloat16"), ((1, 4, 4, 6), "bfloat16")),
        layout(2, ((1, 4, 4, 6), "float32")),
        layout(4, ((1, 4, 4, 6), "bfloat16"), heads=16),
        layout(4, ((1, 4, 3, 6), "bfloat16")),
        layout(4, ((1, 8, 2, 6), "bfloat16")),
        layout(4, ((1, 2, 6), "bfloat16")),
    ):
        with pytest.raises(CapabilityError):
            divide(other, own)
            Staging(other, own, [(memoryview(bytearray(10)), 1)] * 2)


def test_memory_of_a_block_is_given_back() -> None:
    shape = ((1, 4, 4096, 2), "bfloat16"), ((1, 2, 4096, 2), "bfloat16")
    there, here = (Layout(n, 4, ((one,),)) for n, one in zip((1, 2), shape, strict=True))
    own = [(memoryview(bytearray(3 * here.block.itemsize)), here.block.itemsize)] * 2
    staging = Staging(there, here, own)
    ((view, size),) = staging.ranks
    view[:] = b"\1" * (3 * size)
    staging.free(1)
    assert bytes(view[size + mmap.PAGESIZE : 2 * size - mmap.PAGESIZE]).strip(b"\0") == b""
    assert bytes(view[:size]) == bytes(view[2 * size :]) == b"\1" * size
