"""Products of activations and weights, with what stands before and after them.

Few rows: the native kernels of native/, one launch each. Many rows, other dtypes, other cards:
cuBLAS, and Triton kernels around it. plans.py chooses. With FD_BATCH_INVARIANT=1 a Triton kernel of
one fixed tiling computes every product (matmul.py), so that a row does not depend on how many stand
beside it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import adapted, many_rows, native
from .adapted import Adapters
from .common import batch_invariant, cdiv
from .matmul import matmul
from .norm import rms_norm, silu_and_mul
from .plans import LIBRARY, ROWS, WIDEST, Plan, Product, choose, shared_bytes
from .sampling import greedy_of

_EPILOGUES = {
    "plain": native.PLAIN,
    "add": native.ADD,
    "gated": native.GATED,
}
_MANY, SHALLOW = 1024, 1536  # of is_fused: rows, and values a row
_AHEAD = 6  # 16-byte loads of each weight row that a gemv thread has under way


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias."""
    rows = x.shape[0]
    if weight.shape[0] >= WIDEST:
        x = _like_recorded(x)
    return compute(_plan("plain", x, weight), "plain", x, None, 0.0, weight, bias, None)[:rows]


def _like_recorded(x: torch.Tensor) -> torch.Tensor:
    """As many rows as some decode step is captured for. For a vocabulary cuBLAS has a kernel for
    each few rows, and loading one for the first time stops a step for 20 ms."""
    rows = x.shape[0]
    more = -rows % (8 if rows <= 128 else 16)
    if not more or rows in (1, 2, 4) or rows > ROWS[-1] or not x.is_cuda:
        return x
    return x if torch.cuda.is_current_stream_capturing() else F.pad(x, (0, 0, 0, more))


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """linear of rms_norm(x)."""
    plan = _plan("plain", x, weight, has_norm=True)
    return compute(plan, "plain", x, norm_weight, eps, weight, bias, None)


def gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """silu(gate) * up of linear of rms_norm(x), or of x itself."""
    plan = _plan("gated", x, weight, has_norm=norm_weight is not None)
    return compute(plan, "gated", x, norm_weight, eps, weight, bias, None)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual + linear(x), in the residual's memory where that is one piece."""
    residual = residual if residual.is_contiguous() else residual.contiguous()
    return compute(_plan("add", x, weight), "add", x, None, 0.0, weight, bias, residual)


def greedy_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, peaks): the largest logit of each row and where it is, the smallest id among equals."""
    # A kernel that keeps logits to itself was measured slower than cuBLAS and a pass over them.
    return greedy_of(_by_library("plain", x, weight, bias, None))


def plan_with_adapters(
    epilogue: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    adapters: adapted.Shape,
    *,
    has_norm: bool,
) -> Plan | None:
    """How native/gemm.cu computes a product with its adapters; None where it does not."""
    if not _is_readable(epilogue, x, weight):
        return None
    plan = _plan(epilogue, x, weight, has_norm=has_norm)
    product = _product(epilogue, x, weight, has_norm=has_norm)
    return adapted.choose(plan, product, x.shape[0], adapters)


def _product(epilogue: str, x: torch.Tensor, weight: torch.Tensor, *, has_norm: bool) -> Product:
    width, depth = weight.shape
    return Product(epilogue, has_norm, width, depth, str(x.dtype).removeprefix("torch."))


def compute(
    plan: Plan,
    epilogue: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    adapters: Adapters | None = None,
) -> torch.Tensor:
    """The product by this plan; `residual` belongs to the epilogue "add" and is overwritten."""
    if norm_weight is not None and plan.kind != "gemv":
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if plan.kind == "library":
        return _by_library(epilogue, x, weight, bias, residual)
    y = residual
    if y is None:
        width = weight.shape[0] // 2 if epilogue == "gated" else weight.shape[0]
        y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    _launch(plan, epilogue, x, norm_weight, eps, weight, bias, residual, y, adapters)
    return y


def _by_library(
    epilogue: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    if epilogue == "gated" and bias is None and is_fused(x, weight):
        return many_rows.dense_gated(x, weight)
    if batch_invariant():
        y = matmul(x, weight, bias)
        y = y if residual is None else residual.add_(y)
    elif residual is not None:
        if bias is not None:
            residual.add_(bias)
        y = residual.addmm_(x, weight.t())
    else:
        y = F.linear(x, weight, bias)
    return silu_and_mul(y) if epilogue == "gated" else y


def is_fused(x: torch.Tensor, weight: torch.Tensor, deepest: int = SHALLOW) -> bool:
    """Whether what follows is part of the product: prompts, and so few values a row that writing
    the product and reading it again would take long beside it."""
    return (
        x.shape[0] >= _MANY
        and weight.shape[1] <= deepest
        and not batch_invariant()
        and many_rows.can_gate(x, weight)
    )


def _plan(epilogue: str, x: torch.Tensor, weight: torch.Tensor, *, has_norm: bool = False) -> Plan:
    """What computes it."""
    if not _is_readable(epilogue, x, weight):
        return LIBRARY
    product = _product(epilogue, x, weight, has_norm=has_norm)
    _prepare_all(product)
    return choose(product, x.shape[0])


def _is_readable(epilogue: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether native kernels may be asked: rows that cannot be read 16 bytes at a time are left to
    the library."""
    if batch_invariant() or not x.is_cuda or not 0 < x.shape[0] <= ROWS[-1]:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    if epilogue == "gated" and weight.shape[0] % 2:
        return False
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.stride(1) == 1 and weight.is_contiguous()


@functools.cache
def _prepare_all(product: Product) -> None:
    """A product is met for the first time: other numbers of rows will follow, whose kernels are
    compiled meanwhile, on all processors."""
    for rows in ROWS:
        plan = choose(product, rows)
        if plan.kind != "library":
            name, defines = _specialization(plan, product, rows)
            native.compile_ahead(name, defines)


def _specialization(
    plan: Plan, product: Product, num_rows: int, adapters: adapted.Shape | None = None
) -> tuple[str, dict[str, int]]:
    """The native kernel and what it is compiled for."""
    defines = {
        "HALF": int(product.dtype == "float16"),
        "EPILOGUE": _EPILOGUES[product.epilogue],
    }
    if plan.kind == "gemv":
        more = {"K": product.depth, "TILES": -(-num_rows // 8), "WARPS": plan.warps}
        return "gemv", {**defines, **more, "NORM": int(product.has_norm), "AHEAD": _AHEAD}
    share = -(-product.depth // 64 // plan.split)
    sizes = {
        "BM": plan.rows,
        "BN": plan.columns,
        "STAGES": plan.stages,
        "SPLIT": plan.split,
        "RESIDENT": int(share <= plan.stages),
        "DEFERRING": int(plan.is_deferring),
    }
    more = {} if adapters is None else adapted.defines(adapters)
    return "gemm", {**defines, **sizes, **more}


def _launch(
    plan: Plan,
    epilogue: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    adapters: Adapters | None = None,
) -> None:
    num_rows, (width, depth) = x.shape[0], weight.shape
    product = _product(epilogue, x, weight, has_norm=norm_weight is not None)
    shape = None if adapters is None else adapters.shape
    how = _prepared(plan, product, num_rows, shape, torch.cuda.current_device())
    norm = (norm_weight,) if plan.kind == "gemv" else ()
    arguments = [x, ctypes.c_longlong(x.stride(0)), *norm, weight, bias, residual, y]
    arguments += (num_rows, width, float(eps) if plan.kind == "gemv" else depth)
    if adapters is not None:
        arguments.append(adapters.record())
    native.launch(
        how.kernel, how.grid, how.threads, arguments, shared=how.shared, cluster=plan.split
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """All that a launch needs but its arguments."""

    kernel: native.Function
    grid: tuple[int, int, int]
    threads: int
    shared: int


@functools.cache
def _prepared(
    plan: Plan,
    product: Product,
    num_rows: int,
    adapters: adapted.Shape | None,
    device: int,  # kernels are loaded for one
) -> _Launch:
    name, defines = _specialization(plan, product, num_rows, adapters)
    kernel = native.function(name, defines)
    if plan.kind == "gemv":
        return _Launch(kernel, (cdiv(product.width, 16), 1, 1), plan.warps * 32, 0)
    blocks = cdiv(product.width, plan.columns) * cdiv(num_rows, plan.rows)
    if adapters is None:
        shared = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
    else:
        shared = adapted.all_shared_bytes(plan, adapters)
    return _Launch(kernel, (blocks, 1, plan.split), plan.rows * 2, shared)
