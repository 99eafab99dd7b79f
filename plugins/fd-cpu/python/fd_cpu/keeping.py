"""Packed matrices to bytes and back, for `--weight-cache`."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from .moe import PackedExperts
from .packing import KINDS, Packed
from .team import team

# Increased whenever packed.h changes a layout.
LAYOUT: Final = 3


def layout(isa: str) -> str:
    """Instruction sets share the layout today; a file still says for which one it was made."""
    return f"fd-cpu {LAYOUT} {isa}"


def dump(prepared: Any) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """One matrix, or all of a layer's experts; None for anything else."""
    if isinstance(prepared, Packed):
        matrices = [prepared]
    elif isinstance(prepared, PackedExperts):
        matrices = [*prepared.matrices[0], *prepared.matrices[1]]
    else:
        return None
    facts = {"experts": isinstance(prepared, PackedExperts), "matrices": [*map(_facts, matrices)]}
    return facts, [part for matrix in matrices for part in _memory(matrix)]


def restore(facts: dict[str, Any], arrays: list[np.ndarray]) -> Packed | PackedExperts:
    """ValueError if the arrays do not belong to such matrices."""
    left = list(arrays)
    matrices = [_restored(one, left) for one in facts["matrices"]]
    if left:
        raise ValueError(f"{len(left)} arrays belong to no matrix")
    if facts["experts"]:
        half = len(matrices) // 2
        return PackedExperts(matrices[:half], matrices[half:])
    (matrix,) = matrices
    return matrix


def _facts(matrix: Packed) -> dict[str, Any]:
    native = matrix.native
    group = native.group if native.num_groups > 1 else 0
    dtype = "" if matrix.dtype is None else team().xp.dtype_name(matrix.dtype)
    sizes = [native.kind, native.outputs, native.inputs, group]
    beside = {"rotation": native.rotation, "patches": native.num_patches}
    return {"sizes": sizes, "gated": native.gated, "dtype": dtype, **beside}


def _restored(facts: dict[str, Any], left: list[np.ndarray]) -> Packed:
    from . import _native

    kind, outputs, inputs, group = facts["sizes"]
    gated, patches = facts["gated"], facts["patches"]
    if kind == KINDS["coded bfloat16"]:
        native = _native.make_coded(outputs, inputs, gated, patches)
    else:
        native = _native.make_packed(kind, outputs, inputs, group, gated)
    native.rotation = facts["rotation"]
    dtype = team().xp.dtype(facts["dtype"]) if facts["dtype"] else None
    matrix = Packed(native, dtype)
    for part in _memory(matrix):
        if not left or left[0].nbytes != part.nbytes:
            raise ValueError(f"an array of {part.nbytes} bytes is missing")
        part[:] = left.pop(0)
    if not native.has_sound_patches:
        raise ValueError(f"a matrix [{outputs}, {inputs}] has patches outside of it")
    return matrix


def _memory(matrix: Packed) -> list[np.ndarray]:
    """Views of the matrix's parts, valid as long as the matrix."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(where))
        for where, size in matrix.native.memory
    ]
