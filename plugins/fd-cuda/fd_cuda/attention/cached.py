"""What the drivers share: a step is cut into launches, for rows tiled by tokens (prompts) and for
rows split by keys (decodes, drafts). Those whose kernels find the step's own rows in the cache
already launch one kernel for both.

All numbers of rows that are split are read on the device, so that steps of them alone can be
captured. Under FD_BATCH_INVARIANT there is one sort of rows, see prefill.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from fastdeploy_core.errors import CapabilityError

from fd_cuda.kernels.common import batch_invariant

from .plan import DecodeShape, decode_items, prompt_tiles, split_parts
from .prefill import zero_padding
from .tuning import Gpu, Sizes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from fastdeploy_core.contracts.device import DeviceBackend
    from torch import Tensor

# Rows of a batch that feed at most so many tokens are split by keys, not tiled by tokens.
SHORT = 8
LOG2E = math.log2(math.e)


@dataclass(slots=True)
class Launch:
    """One call of the kernel. A program computes `heads` of a token, of which there are `columns`
    groups."""

    shape: DecodeShape
    rows: int  # of the matrix: tokens times heads
    heads: int
    columns: int
    items: Tensor
    parts: tuple[Tensor, ...]  # of split rows


@dataclass(slots=True)
class Metadata:
    batch: AttentionBatch
    launches: list[Any]  # Launch, or what a driver's own kernels take


class AttentionDriver(ABC):
    """prepare() of AttentionBackend."""

    name: str
    contract = (1, 0)
    can_capture_decode = True
    features = frozenset[str]()

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: DeviceBackend, most_tokens: int
    ) -> None:
        self.spec, self.block_size, self._device = spec, block_size, device
        self._exact = spec.dtype == "float32"
        self._itemsize = 4 if self._exact else 2
        self._invariant = batch_invariant()
        self._short = min(SHORT, most_tokens)
        self._most_tokens = most_tokens
        self._scale = spec.scale * LOG2E
        self.use(Sizes(Gpu.of(device.device)))

    def use(self, sizes: Sizes) -> None:
        """Cut work for another GPU than the device's own."""
        self.sizes = sizes

    @abstractmethod
    def _decodes(self, batch: AttentionBatch, max_tokens: int, *, is_alone: bool = True) -> Any:
        """A launch for rows of up to so many tokens; `is_alone`: there are no others."""

    @abstractmethod
    def _tiles(self, batch: AttentionBatch, shortest: int) -> Any:
        """A launch for rows of more tokens."""

    def prepare(self, batch: AttentionBatch) -> Metadata:
        """Cut the step's work: one small kernel for decodes, one for prompts."""
        if batch.num_tokens == 0 or batch.num_seqs == 0:
            return Metadata(batch, [])
        if self._invariant:
            return Metadata(batch, [self._tiles(batch, 0)])
        if 0 < batch.tokens_per_row <= self._most_tokens:
            return Metadata(batch, [self._decodes(batch, batch.tokens_per_row)])
        if not batch.is_exact and not batch.tokens_per_row:
            decodes = self._decodes(batch, 1, is_alone=False)
            return Metadata(batch, [self._tiles(batch, 1), decodes])
        if not batch.is_exact:
            raise CapabilityError(
                f"attention driver {self.name!r} cannot capture {batch.tokens_per_row} tokens per "
                f"row; at most {self._most_tokens} of these heads: use fewer speculative tokens"
            )
        fed = np.diff(batch.cu_seqlens_q)
        short = fed[(fed > 0) & (fed <= self._short)]
        launches = [self._tiles(batch, self._short)] if fed.max() > self._short else []
        if short.size:
            launches.append(self._decodes(batch, int(short.max()), is_alone=not launches))
        return Metadata(batch, launches)

    @staticmethod
    def _out(q: Tensor, batch: AttentionBatch, width: int) -> Tensor:
        """[num_tokens, width]; zeros for padding tokens, which are not read."""
        out = q.new_empty((q.shape[0], width))
        if not batch.is_exact and not batch.tokens_per_row:
            zero_padding(out, batch)
        elif q.shape[0] > batch.cu_seqlens_q[-1]:
            out.zero_()
        return out


class CachedAttention(AttentionDriver):
    """Of kernels that read the step's own rows from the cache."""

    unit: Literal["core", "rope_kv"] = "core"
    can_capture_mixed = False

    @abstractmethod
    def _short_rows(self, num_seqs: int, max_tokens: int) -> tuple[DecodeShape, int, int, int, int]:
        """For rows that are split by keys: the shape; rows, heads and columns of a Launch; the
        width of its results, padded."""

    @abstractmethod
    def _long_rows(self) -> tuple[DecodeShape, int, int, int, int]:
        """For rows that are tiled: the same, but tokens of a tile for the width."""

    def _decodes(self, batch: AttentionBatch, max_tokens: int, *, is_alone: bool = True) -> Any:
        lengths = batch.seq_lens_dev, batch.cu_seqlens_q_dev
        return self._split(*lengths, batch.num_seqs, max_tokens)

    def _split(self, lengths: Tensor, starts: Tensor, num_rows: int, max_tokens: int) -> Launch:
        """A launch for rows of up to so many tokens, `starts` of which are the first."""
        shape, rows, heads, columns, pad = self._short_rows(num_rows, max_tokens)
        items, counters = decode_items(
            *(lengths, starts, num_rows, num_rows * columns, max_tokens, shape), new_in_cache=True
        )
        parts = split_parts(items, columns * rows, pad)
        return Launch(shape, rows, heads, columns, items, (*parts, counters))

    def _tiles(self, batch: AttentionBatch, shortest: int) -> Launch:
        shape, rows, heads, columns, tokens = self._long_rows()
        items = prompt_tiles(batch, shortest, tokens, shape.tile)
        return Launch(shape, rows, heads, columns, items, (items,) * 4)  # no row is split
