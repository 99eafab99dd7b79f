"""How packed weights lie for the native kernels: slabs of 16 outputs by 64 inputs, in the order in
which the lanes of a warp hold them (native/quant.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F

SLAB_ROWS: Final = 16
TURN: Final = 64  # inputs of a slab
# As native/quant.cuh numbers them.
INT4, INT8, FP8, INT8_ROWS, FP8_ROWS, CCQ, TRELLIS, MXFP4 = range(8)
_MIDDLE: Final = {INT4: 8, INT8: 128, FP8: 0}


@dataclass(slots=True, eq=False)
class Slabs:
    """A weight [N, K], or one for each expert. `num_experts` is 0 for one matrix."""

    kind: int  # as native/quant.cuh spells it
    out_features: int
    in_features: int
    num_experts: int
    data: torch.Tensor  # uint8 [(E,) slabs, turns, pieces, 32, 16]; [(E,) N, K]; CCQ: pack_codes
    scales: torch.Tensor  # float32 [(E,) slabs * 16]: of an output
    groups: (
        torch.Tensor | None
    )  # float32 [(E,) slabs, G, 1 or 2, 8, 2]: scale (and offset) of each row
    group_size: int
    block_scales: torch.Tensor | None = None  # float32 [(E,) N / 128, K / 128], as stored
    codes: torch.Tensor | None = None  # float32 [(E,) slabs * 16, 2]: CCQ's affine maps
    tables: dict[torch.dtype, torch.Tensor] = field(
        default_factory=dict
    )  # groups as kernels read them

    @property
    def lies_by_rows(self) -> bool:
        """Whether numbers are a matrix, of which both kernels here and cuBLAS read whole rows."""
        return self.kind in (INT8_ROWS, FP8_ROWS)

    @property
    def num_slabs(self) -> int:
        """Sixteens of outputs, padding counted."""
        return -(-self.out_features // SLAB_ROWS)

    @property
    def num_turns(self) -> int:
        """Sixty-fours of inputs, padding counted."""
        return -(-self.in_features // TURN)

    @property
    def scaled(self) -> int:
        """As native/quant.cuh spells it."""
        return 0 if self.groups is None else int(self.groups.shape[-3])

    def table(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Groups in the dtype of the activations."""
        if self.groups is None:
            return None
        if self.codes is not None:
            return self.groups
        if dtype not in self.tables:
            self.tables[dtype] = self.groups.to(dtype).contiguous()
        return self.tables[dtype]


def _padded(x: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    """[..., N, K] filled up to whole slabs."""
    right, below = -x.shape[-1] % columns, -x.shape[-2] % rows
    return F.pad(x, (0, right, 0, below), value=value) if right or below else x


def pack_slabs(numbers: torch.Tensor, kind: int) -> torch.Tensor:
    """[..., N, K] uint8 (int4: 0..15 around 8; others: their bits) to [..., slabs, turns, pieces,
    32, 16]."""
    numbers = _padded(numbers, SLAB_ROWS, TURN, _MIDDLE[kind] if kind == INT4 else 0)
    lead, slabs, turns = (
        numbers.shape[:-2],
        numbers.shape[-2] // SLAB_ROWS,
        numbers.shape[-1] // TURN,
    )
    flat = numbers.reshape(
        -1, slabs, 2, 8, turns, 4, 2, 4, 2
    )  # e, slab, high, r, turn, s, far, q, odd
    if kind == INT4:
        # slab, turn, r, q, s, odd, far, high: nibbles of a word, lowest first
        nibbles = flat.permute(0, 1, 4, 3, 7, 5, 8, 6, 2)
        data = nibbles[..., 0] | nibbles[..., 1] << 4
        return data.reshape(*lead, slabs, turns, 1, 32, 16)
    pieces = flat.reshape(-1, slabs, 2, 8, turns, 2, 2, 2, 4, 2)  # s is piece, s % 2
    # slab, turn, piece, r, q, s % 2, far, odd, high
    ordered = pieces.permute(0, 1, 4, 5, 3, 8, 6, 7, 9, 2)
    return ordered.reshape(*lead, slabs, turns, 2, 32, 16)


def unpack_slabs(data: torch.Tensor, kind: int) -> torch.Tensor:
    """The inverse: [..., slabs * 16, turns * 64] uint8."""
    lead, (slabs, turns) = data.shape[:-5], data.shape[-5:-3]
    if kind == INT4:
        pairs = data.reshape(-1, slabs, turns, 8, 4, 4, 2, 2)
        nibbles = torch.stack((pairs & 15, pairs >> 4), -1)
        flat = nibbles.permute(0, 1, 8, 3, 2, 5, 7, 4, 6)
    else:
        pieces = data.reshape(-1, slabs, turns, 2, 8, 4, 2, 2, 2, 2)
        flat = pieces.permute(0, 1, 9, 4, 2, 3, 6, 7, 5, 8)
    return flat.reshape(*lead, slabs * SLAB_ROWS, turns * TURN)


def pack_codes(stored: torch.Tensor) -> torch.Tensor:
    """CCQ's bytes [K / 4, N] to [slabs, turns, 32, 8]: a lane's four of a row, four of the row +
    8."""
    rows = _padded(stored.t(), SLAB_ROWS, TURN // 4, 0)
    slabs, turns = rows.shape[0] // SLAB_ROWS, rows.shape[1] * 4 // TURN
    flat = rows.reshape(slabs, 2, 8, turns, 4, 4)  # slab, high, r, turn, q, s
    return flat.permute(0, 3, 2, 4, 1, 5).reshape(slabs, turns, 32, 8).contiguous()


def unpack_codes(data: torch.Tensor) -> torch.Tensor:
    """The inverse, by output: [..., slabs * 16, turns * 16]."""
    lead, (slabs, turns) = data.shape[:-4], data.shape[-4:-2]
    flat = data.reshape(-1, slabs, turns, 8, 4, 2, 4).permute(0, 1, 5, 3, 2, 4, 6)
    return flat.reshape(*lead, slabs * SLAB_ROWS, turns * TURN // 4)
