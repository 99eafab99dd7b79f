"""Runs a model step by step over a small paged cache, without engine or scheduler.

The reference drivers do the work unless others are given; blocks are handed out in a scattered
order, so that nothing works by luck of being contiguous.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fd_accelerator.expert_communicator import AllGatherExperts
from fd_models.latent.indexed import IndexedAttention
from fd_models.recurrent.states import PlainStates
from fd_scale_out.experts import expert_ranks

from fastdeploy_core.config import BatchConfig, CacheConfig, EngineConfig, ParallelConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, cache_dtypes
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.layers import ForwardContext
from fastdeploy_core.loading.loader import LoadedModel, load_model
from fastdeploy_core.models.shapes import model_class
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.checkpoints import find_model
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.moe import ReferenceMoE

BLOCK_SIZE = 8
NUM_BLOCKS = 96


def load_driver(kind: str, name: str) -> Any:
    """The reference drivers, and installed model families."""
    if kind == "model":
        return model_class({"architectures": [name]})
    if kind == "part":
        return expert_ranks
    if kind == "expert_communicator":
        return AllGatherExperts
    if kind == "checkpoint_format":
        return lookup(kind, name)
    return {"attention": _attention, "moe": ReferenceMoE, "state": PlainStates}[kind]


def _attention(spec: AttentionSpec, *place: Any) -> Any:
    return (ReferenceAttention if spec.index is None else IndexedAttention)(spec, *place)


def with_quantizer(name: str) -> Any:
    """The same, and the installed quantizer of that name."""
    return lambda kind, asked: (
        lookup("quantizer", asked or name) if kind == "quantizer" else load_driver(kind, asked)
    )


class PagedModel:
    """One rank of a model with its cache."""

    def __init__(
        self,
        folder: Path,
        library: str,
        *,
        rank: int = 0,
        tp_size: int = 1,
        address: str = "",
        block_size: int = BLOCK_SIZE,
        num_threads: int = 1,
        drivers: Any = load_driver,
        kv_dtype: str = "auto",
        device: str = "cpu",
        experts: str = "",
        eplb: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        self.device = lookup("device", device)(
            DeviceOptions(index=rank, tensor_library=library, num_threads=num_threads)
        )
        self.block_size = block_size
        self.xp = self.device.xp
        config = EngineConfig(
            model=read_model_config(folder, overrides, find_model),
            cache=CacheConfig(block_size=block_size, kv_dtype=kv_dtype),
            # Every step with several tokens has more of them than a decode step can have.
            batch=BatchConfig(max_num_seqs=1),
            parallel=ParallelConfig(
                tensor_parallel_size=tp_size,
                enable_expert_parallel=bool(experts),
                expert_communicator=experts.removeprefix("in place"),
                eplb=eplb,
            ),
        )
        self.communicator = None
        if tp_size > 1:
            self.communicator = self.device.communicator(rank, tp_size, address)
        self.loaded: LoadedModel = load_model(
            config,
            self.device,
            build_kernel_table(device, {"dtype": config.model.dtype, "tensor_library": library}),
            rank,
            tp_size,
            self.communicator,
            drivers,
        )
        self.caches = [self._cache(spec) for spec in self.loaded.builder.kv_layers]
        self._free = list(np.random.default_rng(3).permutation(NUM_BLOCKS))
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def _cache(self, spec: AttentionSpec) -> tuple[Any, ...]:
        shapes = self.loaded.attention[spec].cache_shapes(NUM_BLOCKS)
        return tuple(
            self.xp.zeros(shape, dtype=self.xp.dtype(dtype), device=self.device.device)
            for shape, dtype in zip(shapes, cache_dtypes(spec, len(shapes)), strict=True)
        )

    def step(
        self, rows: list[tuple[str, list[int]]], read: list[int] | None = None
    ) -> list[np.ndarray]:
        """Feed tokens to sequences, all in one batch; returns each row's logits [tokens, vocab], or
        in one array those of the batch's tokens that are `read`."""
        batch, input_ids = self._batch(rows)
        with self.xp.no_grad():
            if (experts := self.loaded.builder.expert_ranks) is not None:
                experts.begin_step(sum(len(tokens) for _, tokens in rows))
            context = ForwardContext(
                batch,
                {spec: d.prepare(batch) for spec, d in self.loaded.attention.items()},
                self.caches,
                None if read is None else self.device.to_device(np.array(read)),
            )
            model = self.loaded.model
            hidden = model.forward(input_ids, batch.positions, context)
            logits = self.device.to_host(model.compute_logits(hidden).float())
        if read is not None:
            return [np.array(logits)]
        return np.split(np.array(logits), batch.cu_seqlens_q[1:-1])

    def greedy(self, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
        """Prefill all prompts together, then decode all together."""
        names = list(prompts)
        logits = self.step(list(prompts.items()))
        tokens = {n: [int(row[-1].argmax())] for n, row in zip(names, logits, strict=True)}
        for _ in range(num_tokens - 1):
            logits = self.step([(n, tokens[n][-1:]) for n in names])
            for name, row in zip(names, logits, strict=True):
                tokens[name].append(int(row[-1].argmax()))
        return tokens

    def close(self) -> None:
        """Leave the group, give the device back."""
        if self.communicator is not None:
            self.communicator.close()
        self.device.close()

    def _batch(self, rows: list[tuple[str, list[int]]]) -> tuple[AttentionBatch, Any]:
        tables, lengths, positions, slots = [], [], [], []
        for name, tokens in rows:
            start = self._lengths.get(name, 0)
            blocks = self._blocks.setdefault(name, [])
            stop = start + len(tokens)
            while len(blocks) * self.block_size < stop:
                blocks.append(int(self._free.pop()))
            self._lengths[name] = stop
            lengths.append(stop)
            tables.append(blocks)
            positions.extend(range(start, stop))
            slots.extend(
                blocks[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, stop)
            )
        width = max(map(len, tables))
        block_tables = np.zeros((len(rows), width), np.int32)
        for row, blocks in enumerate(tables):
            block_tables[row, : len(blocks)] = blocks
        cu_seqlens = np.cumsum([0, *(len(t) for _, t in rows)])
        to_device = self.device.to_device
        is_decode = all(len(tokens) == 1 for _, tokens in rows)
        batch = AttentionBatch.upload(
            *(to_device, cu_seqlens, lengths, block_tables, slots, positions),
            tokens_per_row=1 if is_decode else 0,
        )
        flat = np.array([token for _, tokens in rows for token in tokens], np.int64)
        return batch, to_device(flat)
