"""Which kernel computes a product: measured choices by card, operation, shape and number of rows.

Shipped measurements are in tuned/<card>.json. What they lack is measured at first use (with a
progress bar) and kept in the cache folder; while a graph is captured nothing can be measured, so a
rule decides.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from fastdeploy_core.errors import ConfigError

from fd_cuda.settings import setting

from . import native
from .common import num_processors

logger = logging.getLogger(__name__)

_SHIPPED: Final = Path(__file__).parent / "tuned"
# Numbers of rows that are measured; others take the next larger one's choice.
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PATTERN: Final = re.compile(r"gemv (\d+)|gemm (\d+)x(\d+) (\d+) stages, (\d+) parts|library")
WIDEST: Final = 1 << 16  # a vocabulary: cuBLAS reads so many rows at the memory's speed
MOST_SHARED: Final = 227 * 1024  # bytes of shared memory a block may have
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Product:
    """What is computed: one of "plain", "add", "gated", after a norm or not."""

    epilogue: str
    has_norm: bool
    width: int  # N, rows of the weight
    depth: int  # K
    dtype: str

    @property
    def key(self) -> str:
        """As tables spell it."""
        norm = "norm+" if self.has_norm else ""
        return f"{norm}{self.epilogue} {self.width}x{self.depth} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How. "library" is cuBLAS with Triton kernels around it; only "gemv" norms in the product."""

    kind: str = "library"  # or "gemv", "gemm"
    warps: int = 8  # gemv
    rows: int = 64  # gemm: BM
    columns: int = 128  # BN
    stages: int = 4
    split: int = 1
    # gemm: lets the next kernel start only when x is there, which that one reads.
    is_deferring: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        if self.kind == "gemv":
            return f"gemv {self.warps}"
        if self.kind == "gemm":
            return f"gemm {self.rows}x{self.columns} {self.stages} stages, {self.split} parts"
        return "library"


LIBRARY: Final = Plan()


def read(text: str) -> Plan:
    """A plan from its text in a table."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"a table of measured kernels says {text!r}, which is no plan; delete it")
    if match[1]:
        return Plan("gemv", warps=int(match[1]))
    if match[2]:
        return Plan("gemm", 8, *(int(match[i]) for i in range(2, 6)))
    return LIBRARY


def fits(plan: Plan, product: Product, num_rows: int) -> bool:
    """Whether the plan can compute it."""
    if plan.kind == "library":
        return True
    if product.dtype not in ("bfloat16", "float16") or product.depth % 64:
        return False
    if plan.kind == "gemv":
        if product.has_norm and product.dtype == "float16":
            return False  # x times the norm's weight may not fit before it is divided
        return num_rows <= 16 and product.depth % (32 * plan.warps) == 0
    return product.width % 8 == 0 and native.has_wgmma()


def rule(product: Product, num_rows: int) -> Plan:
    """A choice without measurement, from what was seen on an H200."""
    if not native.available():
        return LIBRARY
    for warps in (8, 16, 4, 2, 1):
        plan = Plan("gemv", warps=warps)
        if fits(plan, product, num_rows):
            return plan
    return tiles_of(product, num_rows)


def tiles_of(product: Product, num_rows: int) -> Plan:
    """Of native/gemm.cu, where nothing was measured; the library for many rows."""
    if num_rows > 64 or not native.available():
        return LIBRARY
    rows = columns = 64
    out = columns // 2 if product.epilogue == "gated" else columns
    width = product.width // 2 if product.epilogue == "gated" else product.width
    tiles = -(-width // out) * -(-num_rows // rows)
    split = 1
    while split < 8 and tiles * split * 2 <= num_processors() and product.depth >= 128 * split:
        split *= 2
    stages = max(_stages(product, rows, columns, split), default=4)
    plan = Plan("gemm", 8, rows, columns, stages, split)
    return plan if fits(plan, product, num_rows) else LIBRARY


def _stages(product: Product, rows: int, columns: int, split: int) -> list[int]:
    """Numbers of tiles in shared memory worth trying: a block's whole share of K, or a ring."""
    share = -(-product.depth // 64 // split)
    return [
        stages
        for stages in sorted({max(3, share), 4, 6, 8})
        if stages <= max(3, share) and shared_bytes(rows, columns, stages, split) <= MOST_SHARED
    ]


def shared_bytes(rows: int, columns: int, stages: int, split: int) -> int:
    """What a block of native/gemm.cu keeps in shared memory: tiles, what aligning them takes, parts
    of the sums."""
    parts = rows * (columns + 4) * 4 if split > 1 else 0
    return stages * (rows + columns) * 128 + 1024 + parts


def candidates(product: Product, num_rows: int) -> list[Plan]:
    """What is worth measuring."""
    found = [LIBRARY]
    if num_rows <= 16:
        found += [Plan("gemv", warps=warps) for warps in (4, 8, 16)]
    if num_rows >= 8:
        width = product.width // 2 if product.epilogue == "gated" else product.width
        for rows in (64,) if num_rows <= 64 else (64, 128):
            for columns in (32, 64, 128):
                out = columns // 2 if product.epilogue == "gated" else columns
                tiles = -(-width // out) * -(-num_rows // rows)
                for split in (1, 2, 4, 8):
                    blocks, most = tiles * split, num_processors()
                    if (split > 1 and blocks > 2.2 * most) or (split < 8 and blocks < 0.45 * most):
                        continue
                    if product.depth < 64 * split or (rows == 64 and columns == 32 and split == 8):
                        continue
                    found += [
                        Plan("gemm", 8, rows, columns, stages, split)
                        for stages in _stages(product, rows, columns, split)
                    ]
    return [plan for plan in found if fits(plan, product, num_rows)]


@functools.cache
def card() -> str:
    """The GPU's name, as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def table_path() -> Path:
    """Where this machine's own measurements are kept: of this torch, whose library they are beside,
    and of these kernels."""
    kernels = "".join(native.source_of(f"{name}.cu") for name in ("gemv", "gemm"))
    version = f"{torch.__version__}-{hashlib.sha256(kernels.encode()).hexdigest()[:8]}"
    return native.cache_folder() / f"products-{card()}-{version}.json"


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    """Shipped measurements, this machine's own over them."""
    table: dict[str, dict[str, str]] = {}
    for path in (_SHIPPED / f"{card()}.json", table_path()):
        try:
            for key, rows in json.loads(path.read_text("utf-8")).items():
                table.setdefault(key, {}).update(rows)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("measured kernels in %s are left out: %s", path, error)
    return table


def choose(
    epilogue: str, has_norm: bool, shape: tuple[int, ...], dtype: torch.dtype, num_rows: int
) -> Plan:
    """The plan for so many rows of x and a weight of this shape."""
    key = (epilogue, has_norm, shape, dtype, num_rows)
    plan = _chosen.get(key)
    if plan is None:
        if num_rows > ROWS[-1] or not native.available():
            return LIBRARY
        width, depth = shape
        product = Product(epilogue, has_norm, width, depth, str(dtype).removeprefix("torch."))
        plan, is_final = _choose(product, next(size for size in ROWS if size >= num_rows))
        if is_final:
            _chosen[key] = plan
    return plan


def foreseen(product: Product) -> dict[int, Plan]:
    """What will be chosen for each number of rows, as far as that needs no measuring."""
    if not native.available() or product.dtype not in ("bfloat16", "float16") or product.depth % 64:
        return {}
    if product.key not in _table() and setting("FD_CUDA_TUNE") != "0":
        return {}
    return {size: _choose(product, size)[0] for size in ROWS if _is_settled(product, size)}


def _is_settled(product: Product, size: int) -> bool:
    is_measured = str(size) in _table().get(product.key, {})
    return is_measured or setting("FD_CUDA_TUNE") == "0"


# What has been chosen: the decode loop must not think twice.
_chosen: dict[tuple[str, bool, tuple[int, ...], torch.dtype, int], Plan] = {}
_known: dict[tuple[Product, int], Plan] = {}


def _choose(product: Product, size: int) -> tuple[Plan, bool]:
    """The plan, and whether it will stay so."""
    known = _known.get((product, size))
    if known is not None:
        return known, True
    text = _table().get(product.key, {}).get(str(size))
    if text is not None:
        plan = read(text)
        plan = plan if fits(plan, product, size) else rule(product, size)
    elif product.dtype not in ("bfloat16", "float16") or product.depth % 64:
        plan = LIBRARY
    elif product.width >= WIDEST:
        plan = LIBRARY
    elif setting("FD_CUDA_TUNE") == "0":
        plan = rule(product, size)
    elif torch.cuda.is_current_stream_capturing():
        return rule(product, size), False
    else:
        plan = _measured(product)[size]
    _known[product, size] = plan
    return plan, True


def _measured(product: Product) -> dict[int, Plan]:
    """Measure every number of rows of a product, and keep the choices."""
    from .tune import measure

    with _lock:
        plans = measure(product)
        for size, plan in plans.items():
            _known[product, size] = plan
        rows = {str(size): str(plan) for size, plan in plans.items()}
        _table().setdefault(product.key, {}).update(rows)
        _keep(product.key, rows)
    return plans


def _keep(key: str, rows: dict[str, str]) -> None:
    """Add to this machine's table, which other ranks may be adding to at the same time."""
    path = table_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
            kept.setdefault(key, {}).update(rows)
            native.keep(path, json.dumps(kept, indent=1, sort_keys=True).encode())
    except (OSError, ValueError) as error:
        logger.info("measured kernels are not kept in %s: %s", path, error)
