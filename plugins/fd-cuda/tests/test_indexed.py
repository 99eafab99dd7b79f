"""Latent attention with an indexer against the plain tensor code of fd-models, which the whole
model is tested with against transformers: steps as they come, and captured ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.model import IndexSpec
from fd_models.latent import indexed
from test_kernels import DEVICE

from fastdeploy_testing.drivers import build_kernel_table, lookup
from fd_cuda.attention.latent.indexed import IndexedAttention

BLOCK, RANK, ROPE, TOP_K = 16, 32, 16, 24
# Tokens that rows feed, and all their tokens: just as many as are chosen, fewer and more.
STEPS = {
    "decodes": ((1, 1, 1), (90, TOP_K, 25)),
    "mixed": ((30, 1, 5), (70, 61, 26)),
    "few keys": ((3, 1), (20, 9)),
}


class World:
    """One step of one layer, and its caches."""

    def __init__(self, fed: tuple[int, ...], ends: tuple[int, ...], dtype: torch.dtype) -> None:
        torch.manual_seed(sum(ends))
        name = str(dtype).removeprefix("torch.")
        self.spec = AttentionSpec(
            "mla", 4, 1, RANK + ROPE, RANK, 0.2, name, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
            index=IndexSpec(3, 20, TOP_K),
        )  # fmt: skip
        most = 6
        blocks = torch.randperm(len(ends) * most).numpy().astype(np.int32) + 1
        self.tables = blocks.reshape(len(ends), most)
        places = [np.arange(end - n, end) for n, end in zip(fed, ends, strict=True)]
        slots = [
            table[at // BLOCK] * BLOCK + at % BLOCK
            for table, at in zip(self.tables, places, strict=True)
        ]
        self.fed, self.ends, tokens = fed, ends, sum(fed)
        self.slots = np.concatenate(slots)

        def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape).to(DEVICE, kind)

        num_blocks = len(ends) * most + 1
        self.cache = (normal(num_blocks, BLOCK, 1, RANK + ROPE), normal(num_blocks, BLOCK, 1, 20))
        self.q, self.row = normal(tokens, 4, RANK + ROPE), normal(tokens, 1, RANK + ROPE)
        # Whole numbers, so that many scores are the same.
        index_q, index_k = normal(tokens, 3, 20).round(), normal(tokens, 1, 20).round()
        self.cache[1].copy_(self.cache[1].round())
        self.index = (index_q, index_k, normal(tokens, 3, kind=torch.float32).round())

    def run(self, driver: Any, *, is_exact: bool = True) -> tuple[torch.Tensor, ...]:
        """The result, and the caches after it."""
        cache = tuple(pool.clone() for pool in self.cache)
        each = self.fed[0] if len(set(self.fed)) == 1 else 0
        batch = AttentionBatch.upload(
            lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE),
            np.cumsum([0, *self.fed]), self.ends, self.tables, self.slots, self.slots, each,
        )  # fmt: skip
        batch.is_exact = is_exact
        row = self.row
        given = (self.q, row, row[:, :, :RANK], cache, driver.prepare(batch))
        return driver.forward(*given, index=self.index), *cache


def drivers(spec: AttentionSpec) -> tuple[Any, Any]:
    device: Any = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch"))
    kernels = build_kernel_table("cuda", {"tensor_library": "torch"})
    return (
        IndexedAttention(spec, BLOCK, device, kernels),
        indexed.IndexedAttention(spec, BLOCK, device, build_kernel_table("cpu", {})),
    )


@pytest.mark.parametrize("name", STEPS)
def test_it_attends_to_what_the_definition_attends_to(name: str) -> None:
    world = World(*STEPS[name], torch.float32)
    mine, plain = drivers(world.spec)
    for found, wanted in zip(world.run(mine), world.run(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fed", [1, 3])
def test_a_captured_step_gives_what_it_gives_as_it_comes(fed: int) -> None:
    """By the device's numbers alone, which say that the last row is nobody's."""
    world = World((fed,) * 3, (90, 40, fed), torch.float32)
    mine, _ = drivers(world.spec)
    wanted = world.run(mine)[0]
    world.slots[2 * fed :] = -1
    real = AttentionBatch.upload

    def of_nobody(*given: Any) -> AttentionBatch:
        batch = real(*given)
        batch.seq_lens_dev[2] = 0
        batch.block_tables[:] = 0
        batch.seq_lens[:] = 96
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionBatch, "upload", of_nobody)
        found = world.run(mine, is_exact=False)[0]
    torch.testing.assert_close(found[: 2 * fed], wanted[: 2 * fed], rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()


def test_scores_of_many_tokens_are_kept_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fd_cuda.attention.latent import indexed as module

    world = World(*STEPS["mixed"], torch.float32)
    mine, _ = drivers(world.spec)
    whole = world.run(mine)[0]
    monkeypatch.setattr(module, "_MOST_SCORES", 500)
    monkeypatch.setattr(module, "_MOST_SPLIT", 4)
    torch.testing.assert_close(world.run(mine)[0], whole, rtol=1e-5, atol=1e-5)
