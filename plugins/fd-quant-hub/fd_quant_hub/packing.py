"""Small integers in larger ones: those of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

# AWQ's order of eight int4 columns inside one int32, lowest bits first.
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_int32(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[..., n] int32 to [..., n * 32 / bits] uint8, lowest bits first.

    `order` names the value of each place in the integer, lowest first.
    """
    xp = namespace(packed)
    shifts = xp.arange(0, 32, bits, dtype=xp.int32, device=_device(packed))
    # The shift keeps the sign; the mask removes it.
    wide = xp.bitwise_and(xp.right_shift(packed.unsqueeze(-1), shifts), (1 << bits) - 1)
    if order is not None:
        place = [order.index(n) for n in range(len(order))]
        wide = xp.stack([wide[..., p] for p in place], -1)
    per_word = 32 // bits
    return wide.reshape([*packed.shape[:-1], packed.shape[-1] * per_word]).to(xp.uint8)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """unpack_int32 along the first dimension: [n, N] int32 to [n * 32 / bits, N] uint8."""
    return unpack_int32(packed.transpose(0, 1).contiguous(), bits).transpose(0, 1)


def _device(x: Tensor) -> str:
    return x.device if isinstance(x.device, str) else str(x.device)
