"""Tensors in pages of the host that exist once they are written."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

from fastdeploy_core.tensor import DTYPE_BYTES

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor, TensorLibrary


def untouched(xp: TensorLibrary, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros that take memory page by page; MemoryError where there is no room for all of them."""
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes of host memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a step reads a little of many blocks: a page each
        memory.madvise(mmap.MADV_HUGEPAGE)
    return xp.from_buffer(memory, dtype, shape)
