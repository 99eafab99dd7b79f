"""The reference's modules, as `mypy` has to find them: implementations of the operations that
contracts/ops/ declares. Nothing imports this file.
"""

from __future__ import annotations

from fastdeploy_core.contracts.ops.body import BodyOperations
from fastdeploy_core.contracts.ops.cache import CacheOperations
from fastdeploy_core.contracts.ops.decode import DecodeOperations, HistoryOperations
from fastdeploy_core.contracts.ops.moe import MoEOperations
from fastdeploy_core.reference.ops import body as body_kernels
from fastdeploy_core.reference.ops import cache as cache_kernels
from fastdeploy_core.reference.ops import history as history_kernels
from fastdeploy_core.reference.ops import moe as moe_kernels
from fastdeploy_core.reference.ops import step as step_kernels

body: BodyOperations = body_kernels
cache: CacheOperations = cache_kernels
decode: DecodeOperations = step_kernels
history: HistoryOperations = history_kernels
moe: MoEOperations = moe_kernels
