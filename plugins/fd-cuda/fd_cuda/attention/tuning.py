"""Sizes of tiles and splits: rules that follow what was fastest on an H200, for any number of
multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fd_cuda.kernels.common import pad2

from .native_gqa import NativeShape
from .plan import DecodeShape, StreamShape

_HOPPER = (9, 0)
_ROOMY = 163 * 1024


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How prefill rows are computed."""

    rows: int  # M: tokens times heads of a group
    keys: int  # N
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """What sizes depend on."""

    num_multiprocessors: int
    from_hopper_on: bool  # clusters of blocks, and a copy engine that fetches tensor tiles
    is_small: bool = False  # a program has less shared memory than an A100's 163 KiB

    @classmethod
    def of(cls, device: torch.device | str) -> Gpu:
        """The properties of a device; those of a small GPU for a processor (kernels
        interpreted)."""
        if torch.device(device).type != "cuda":
            return cls(4, False)
        properties = torch.cuda.get_device_properties(device)
        return cls(
            properties.multi_processor_count,
            (properties.major, properties.minor) >= _HOPPER,
            properties.shared_memory_per_block_optin < _ROOMY,  # type: ignore[attr-defined]
        )


class Sizes:
    """The sizes for one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def decode(
        self, num_seqs: int, num_kv_heads: int, rows: int, width: int, itemsize: int
    ) -> DecodeShape:
        """For decode rows of `rows` query rows (tokens times heads of a group), `width` per key."""
        tile = 64 if itemsize * width <= 256 else 32
        if itemsize == 4:
            tile = 16
        units = max(1, num_seqs * num_kv_heads)
        per_multiprocessor = 1 if units * 2 <= self.gpu.num_multiprocessors else 4
        target = max(1, self.gpu.num_multiprocessors * per_multiprocessor // num_kv_heads)
        return DecodeShape(
            tile=tile,
            min_tiles=1,
            max_splits=32,
            target=target,
            num_warps=4 if rows <= 64 else 8,
            num_stages=2 if itemsize == 4 or (self.gpu.is_small and width > 128) else 3,
        )

    def native(
        self,
        num_seqs: int,
        num_kv_heads: int,
        columns: int,
        is_alone: bool,
    ) -> NativeShape | StreamShape | None:
        """For the CUDA C++ kernels; None where the Triton kernel is faster: so many rows that the
        GPU is full without cutting any. `is_alone`: no prompts are in the step, so that most rows
        are decodes.

        The sizes are those that were fastest on an H200, over 1 to 256 rows of 1k to 32k tokens.
        Clusters share a group of multiprocessors, and two of 8 blocks need one to themselves.
        """
        units, processors = num_seqs * num_kv_heads, self.gpu.num_multiprocessors
        has_clusters = self.gpu.from_hopper_on
        occupancy = of_four_warps = 2 if columns <= 16 else 1
        warps = 4
        if is_alone and has_clusters and columns == 8 and 2 * processors < units <= 4 * processors:
            # A block for every row and head, all at a time. Fewer rows are cut, which costs these
            # blocks more than a cluster's; more leave the last ones to a second round.
            return StreamShape(32, 2, 1, 3, 4, stream_blocks(units, 4 * processors))
        elif units >= 8 * processors or (units >= 4 * processors - 16 and num_seqs >= processors):
            return None
        else:
            cluster, warps, min_tiles = self._blocks_of_a_row(units, columns)
            occupancy = 1 if warps == 8 else of_four_warps
            blocks = processors if cluster == 8 else processors * occupancy
            target = max(1, blocks // (cluster * num_kv_heads))
        if not has_clusters:
            cluster, warps, min_tiles, occupancy = 1, 4, 4, of_four_warps
            target = max(1, processors * occupancy // num_kv_heads)
        plan = DecodeShape(64, min_tiles, 64, target, 4, 3)
        return NativeShape(plan, cluster, 2 if columns == 8 else 1, occupancy, warps)

    def _blocks_of_a_row(self, units: int, columns: int) -> tuple[int, int, int]:
        """Blocks of a cluster, their warps, and the fewest tiles of a split: splits of one row meet
        in global memory, which takes as long as several turns."""
        processors = self.gpu.num_multiprocessors
        if units * 16 <= processors:  # all that most rows have is taken at one go
            return 8, 8, 24
        if columns == 8 and units * 8 > processors >= units:  # one block a multiprocessor
            return (2, 8, 32) if units * 2 <= processors else (1, 8, 8)
        cluster, blocks = 1, processors * (2 if columns <= 16 else 1)
        while cluster < 8 and units * cluster * 2 <= (blocks if cluster == 1 else processors):
            cluster *= 2
        return cluster, 4, {1: 4, 2: 8, 4: 16, 8: 24}[cluster]

    def quantized(self, num_seqs: int, num_kv_heads: int, columns: int) -> NativeShape:
        """For quant_attention.cu."""
        processors, units, cluster = self.gpu.num_multiprocessors, num_seqs * num_kv_heads, 1
        # As many blocks as registers allow; two where that many hold all rows and heads without
        # cutting any.
        occupancy = 1 if columns == 32 else 2 if columns == 16 or units > processors else 3
        if self.gpu.from_hopper_on:
            while cluster < 8 and units * 2 <= processors >= units * cluster // 2:
                cluster *= 2
        target = max(1, processors * occupancy // (cluster * num_kv_heads))
        plan = DecodeShape(64, {1: 4, 2: 4, 4: 8, 8: 16}[cluster], 64, target, 4, 1)
        return NativeShape(plan, cluster, 2 if columns == 8 else 1, occupancy)

    def prefill(self, group: int, width: int, itemsize: int) -> PrefillShape:
        """For prompts."""
        if itemsize == 4:
            return PrefillShape(max(16, pad2(group)), 16, 4, 1)
        # Wide heads: two warp groups share what is fetched, with 64 rows each.
        if width > 128 and self.gpu.from_hopper_on:
            return PrefillShape(128, 64, 8, 2)
        # So much shared memory that two programs share a multiprocessor, and their turns overlap.
        rows = max(64, pad2(group))
        warps, stages = 4 if rows == 64 and width <= 128 else 8, 3 if width <= 128 else 2
        keys = 64 if group > 5 and not (self.gpu.is_small and width > 128) else 32
        return PrefillShape(rows, keys, warps, stages)

    def native_prefill(self, rows: int) -> PrefillShape:
        """For prompts that prompt_attention.cu serves with so many rows, and for what the Triton
        kernel then takes in its place."""
        return PrefillShape(pad2(rows), 64, 8, 2)

    def latent(self, head_blocks: int, itemsize: int) -> DecodeShape:
        """For latent rows of up to 576 values."""
        return DecodeShape(
            tile=16 if itemsize == 4 or self.gpu.is_small else 32,
            min_tiles=2,
            max_splits=32,
            target=max(1, self.gpu.num_multiprocessors // head_blocks),
            num_warps=8,
            num_stages=2 if itemsize == 2 else 1,
        )


def stream_blocks(units: int, places: int) -> int:
    """So many blocks of stream_attention.cu that shares are whole rows, or whole fractions of rows,
    where all are of one length. `units`: rows times kv heads; `places`: blocks that run at a
    time."""
    return units * (places // units) if units <= places else units // -(-units // places)
