"""The named operations: what a kernel is, and the table a device fills in any order.

An operation is a plain function over tensors, declared as a method of a Protocol of this room:
arguments in order, shapes and dtypes (signature.py says how to read them), meaning. Group
`fastdeploy.kernels` maps a device name to a table `{operation: "module:function"}` (or `Kernel`
records with a predicate). What a device lacks comes from the reference, which is also what every
kernel is tested against (fastdeploy_core/reference/). Lookup happens once, when layers are built.

Arguments are positional. Any size may be 0 but those of weights. Sums, norms and softmax are
computed in float32 or better.
"""

from __future__ import annotations

from typing import Final

from fastdeploy_core.contracts.signature import Operation, declared_in

from .body import BodyOperations, FusedOperations
from .cache import CacheOperations
from .decode import DecodeOperations, HistoryOperations
from .kernel import KERNEL_FACTS, KERNEL_SIZES, OBJECTIVES, Deny, Kernel, KernelTable
from .moe import MoEOperations
from .quantized import FORMAT_OPERATIONS, KV_OPERATIONS
from .sampling import SamplingOperations

__all__ = [
    "FORMAT_OPERATIONS",
    "KERNEL_FACTS",
    "KERNEL_SIZES",
    "KV_OPERATIONS",
    "OBJECTIVES",
    "OPERATIONS",
    "QUANTIZED_OPERATIONS",
    "Deny",
    "Kernel",
    "KernelTable",
]

# Operations that every model needs, and those that only quantized ones need.
OPERATIONS: Final[dict[str, Operation]] = {
    operation.name: operation
    for operation in declared_in(
        BodyOperations,
        FusedOperations,
        CacheOperations,
        DecodeOperations,
        HistoryOperations,
        MoEOperations,
        SamplingOperations,
    )
}
QUANTIZED_OPERATIONS: Final[dict[str, Operation]] = {**FORMAT_OPERATIONS, **KV_OPERATIONS}
