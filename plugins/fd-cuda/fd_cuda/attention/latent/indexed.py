"""Attention driver `cuda_indexed`: latent attention to the keys that an indexer likes best
(DeepSeek V3.2, arXiv 2512.02556).

What a token attends to is a list of slots; to the kernel of latent attention that is a sequence of
its own, in blocks of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from fastdeploy_core.errors import CapabilityError

from fd_cuda.attention.cached import Launch, Metadata
from fd_cuda.attention.plan import ITEM
from fd_cuda.kernels.common import INTERPRETED, cdiv, num_processors, pad2
from fd_cuda.kernels.common import options as launch_options

from .choose import choose_keys, index_scores
from .driver import LatentAttention

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, KVScales
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from torch import Tensor

_TILE: Final = 64  # keys of a program that scores them
_WAVES: Final = 8  # programs that score, a multiprocessor
_SPAN: Final = 4096  # of one that chooses, at a time
_MOST_SCORES: Final = 64 << 20  # that are kept at a time
_MOST_SPLIT: Final = 512  # tokens up to which the keys of one are divided among programs


@dataclass(slots=True)
class _Chosen(Metadata):
    """A step in which tokens may see more keys than they attend to."""

    rows: Tensor  # [num_tokens] int32
    seen: Tensor  # [num_tokens] int32; 0: padding
    width: int  # most keys that a token sees


class IndexedAttention(LatentAttention):
    """One instance per distinct spec; see AttentionBackend. The cache has a latent row and an index
    key of each token. Steps whose rows have no more keys than are chosen are plain ones."""

    name = "cuda_indexed"
    contract = (1, 5)
    features = frozenset({"index"})

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(spec, block_size, device, kernels)
        if spec.index is None:
            raise CapabilityError(f"attention driver {self.name!r} serves layers with an indexer")
        self._index, self._write = spec.index, kernels["kv_write"]

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Latent rows, and index keys."""
        keys = (num_blocks, self.block_size, 1, self._index.dim)
        return (*super().cache_shapes(num_blocks), keys)

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Whose keys each token sees."""
        width, each = int(batch.seq_lens.max(initial=0)), batch.tokens_per_row
        if not batch.is_exact:
            width = batch.block_tables.shape[1] * self.block_size
        if width <= self._index.top_k or not batch.num_tokens:
            return super().prepare(batch)
        if batch.is_exact:
            fed = np.diff(batch.cu_seqlens_q)
            rows = np.repeat(np.arange(batch.num_seqs), fed)
            nth = np.arange(batch.num_tokens) - batch.cu_seqlens_q[rows]
            both = np.stack((rows, batch.seq_lens[rows] - fed[rows] + nth + 1)).astype(np.int32)
            of_row, seen = self._device.to_device(both)
        elif each:
            token = torch.arange(batch.num_tokens, dtype=torch.int32, device=self._device.device)
            of_row, ends = token // each, batch.seq_lens_dev.to(torch.int32)
            seen = (ends[of_row] - (each - 1) + token % each).clamp(min=0)
        else:
            raise CapabilityError(
                f"attention driver {self.name!r} takes steps as they come and those whose rows "
                "feed as many tokens each, and rows of this one differ"
            )
        return _Chosen(batch, [self._launch(seen)], of_row, seen, width)

    def _launch(self, seen: Tensor) -> Launch:
        """Of the kernel of latent attention: a row for each token."""
        tokens, counts = seen.shape[0], seen.clamp(max=self._index.top_k)
        numbers = torch.arange(tokens + 1, dtype=torch.int32, device=seen.device)
        if tokens <= _MOST_SPLIT and not self._invariant:
            return self._split(counts, numbers, tokens, 1)
        shape, rows, heads, columns, _ = self._short_rows(tokens, 1)
        items = torch.zeros((tokens, ITEM), dtype=torch.int32, device=seen.device)
        items[:, 0] = items[:, 6] = numbers[:-1]
        items[:, 2] = ((counts + (shape.tile - 1)) // shape.tile).clamp(min=1)
        items[:, 4] = items[:, 7] = 1
        items[:, 5] = counts
        return Launch(shape, rows, heads, columns, items, (items,) * 4)  # no row is split

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: tuple[Tensor, ...],
        metadata: Any,
        rotary: Tensor | None = None,
        scales: KVScales | None = None,
        index: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward, with `index`."""
        if index is None:
            raise CapabilityError(f"attention driver {self.name!r} needs an indexer's part")
        batch = metadata.batch
        for row, pool in ((k, cache[0]), (index[1], cache[1])):
            self._write((row,), (pool,), batch.slot_mapping)
        out = self._out(q, batch, self.spec.num_heads * self.spec.kv_lora_rank)
        tables, size = batch.block_tables_dev, self.block_size
        if isinstance(metadata, _Chosen):
            tables, size = self._choose(index[0], index[2], cache[1], metadata), 1
        self._attend(q, out, cache[0], metadata.launches, tables, size)
        return out

    def _choose(self, q: Tensor, weights: Tensor, keys: Tensor, step: _Chosen) -> Tensor:
        """[num_tokens, top_k] int32 slots."""
        index, tables = self._index, step.batch.block_tables_dev
        tokens, top_k = step.seen.shape[0], index.top_k
        chosen = torch.zeros((tokens, top_k), dtype=torch.int32, device=q.device)
        each = min(tokens, max(1, _MOST_SCORES // step.width))
        scores = torch.empty((each, step.width), dtype=torch.float32, device=q.device)
        given = (step.rows, step.seen, tables)
        for first in range(0, tokens, each):
            count = min(each, tokens - first)
            across = min(cdiv(step.width, _TILE), cdiv(_WAVES * num_processors(), count))
            index_scores[(count, across)](
                *(q, weights, keys, *given, scores, first, step.width),
                *(q.stride(0), q.stride(1), weights.stride(0), tables.stride(0)),
                HEADS=index.num_heads,
                HEADS_PAD=max(16, pad2(index.num_heads)),
                DIM=index.dim,
                DIM_PAD=max(16, pad2(index.dim)),
                TOP_K=top_k,
                BLOCK_SIZE=self.block_size,
                TILE=_TILE,
                EXACT=self._exact,
                **launch_options(num_warps=4),
            )
            choose_keys[(count,)](
                *(scores, *given, chosen, first, step.width, tables.stride(0)),
                TOP_K=top_k,
                BLOCK_SIZE=self.block_size,
                SPAN=64 if INTERPRETED else _SPAN,
                **launch_options(num_warps=8),
            )
        return chosen
