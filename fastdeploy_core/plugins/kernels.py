"""The kernel table of one device: for each operation the function that layers will call.

Cells come from every distribution's table for that device; what nobody provides comes from the
reference. Chosen once, when layers are built.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.contracts.ops import OPERATIONS, Kernel
from fastdeploy_core.errors import CapabilityError, PluginError

from .discovery import PluginEntry, discover
from .drivers import load
from .preflight_child import describe

if TYPE_CHECKING:
    from .resolve import ResolvedPlugins

logger = logging.getLogger(__name__)

REFERENCE: Final = "cpu"  # the device name under which the reference registers its table


@dataclass(frozen=True, slots=True)
class _Cell:
    operation: str
    kernel: Kernel
    entry: PluginEntry


class ChosenKernels:
    """A KernelTable: operations by name, already chosen and imported."""

    def __init__(
        self, device: str, functions: dict[str, Callable[..., Any]], origins: dict[str, str]
    ) -> None:
        self.device = device
        self.functions = functions
        self._origins = origins

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation; KeyError names the operations there are."""
        try:
            return self.functions[operation]
        except KeyError:
            raise KeyError(
                f"device {self.device!r} has no kernel for {operation!r}; "
                f"there are: {', '.join(sorted(self.functions))}"
            ) from None

    def __contains__(self, operation: object) -> bool:
        """Whether there is a kernel for the operation."""
        return operation in self.functions

    def origins(self) -> Mapping[str, str]:
        """For the start-up report: operation -> distribution it came from."""
        return dict(self._origins)


def build_kernel_table(
    device_name: str,
    facts: Mapping[str, Any] | None = None,
    allow_fallback: bool = True,
    *,
    resolved: ResolvedPlugins | None = None,
) -> ChosenKernels:
    """Choose a kernel for every operation.

    `facts` (dtype, head_dim, ...) is what cells' predicates are asked. With allow_fallback=False
    an operation that only the reference has is a CapabilityError.
    """
    entries = discover().of("kernels") if resolved is None else resolved.plugin_entries("kernels")
    facts = facts or {}
    own = _cells([e for e in entries if e.name == device_name])
    reference = (
        [] if device_name == REFERENCE else _cells([e for e in entries if e.name == REFERENCE])
    )
    functions, origins = _choose([c for c in own if not c.kernel.composes], facts)
    composing = [c for c in (*own, *reference) if c.kernel.composes]
    missing = [c for c in reference if c.operation not in functions and not c.kernel.composes]
    fallback, fallback_origins = _choose(missing, facts)
    if fallback and not allow_fallback:
        raise CapabilityError(
            f"device {device_name!r} lacks {len(fallback)} of {len(functions) + len(fallback)} "
            f"kernels and fallback is switched off: {', '.join(sorted(fallback))}; "
            "allow the reference (drop --no-fallback) or install a plugin that provides them"
        )
    if fallback:
        logger.info(
            "device %s: %d of %d operations run on the reference kernels: %s",
            device_name,
            len(fallback),
            len(functions) + len(fallback),
            ", ".join(sorted(fallback)),
        )
    table = ChosenKernels(device_name, functions | fallback, origins | fallback_origins)
    return _compose(table, composing, facts)


def operations_without_kernel(table: ChosenKernels) -> list[str]:
    """Operations of the contract that the table lacks; empty for a working installation."""
    return [o for o in OPERATIONS if o not in table]


def _compose(
    table: ChosenKernels, cells: Iterable[_Cell], facts: Mapping[str, Any]
) -> ChosenKernels:
    """Add the operations that nobody has a kernel of its own for, made of the table's others."""
    functions, origins = dict(table.functions), dict(table.origins())
    for cell in cells:
        if cell.operation in functions:
            continue
        makers, _ = _choose([cell], facts)
        try:
            for operation, make in makers.items():
                functions[operation] = make(table)
                origins[operation] = cell.entry.distribution
        except Exception as error:
            logger.warning(
                "kernel %s of %s is left out: %s",
                cell.operation,
                cell.entry.origin,
                describe(error),
            )
    return ChosenKernels(table.device, functions, origins)


def _cells(entries: Iterable[PluginEntry]) -> list[_Cell]:
    """The cells of all tables; a table that cannot be read costs its cells and a warning."""
    cells = []
    for entry in entries:
        try:
            table = load(entry)
            if not isinstance(table, Mapping):
                raise TypeError(f"a kernel table maps operations to targets, got {type(table)}")
            for operation, value in table.items():
                kernel = Kernel(value) if isinstance(value, str) else value
                if not isinstance(kernel, Kernel):
                    raise TypeError(f"{operation}: expected 'module:function' or Kernel")
                cells.append(_Cell(operation, kernel, entry))
        except (PluginError, TypeError) as error:
            logger.warning(
                "kernel table %r of %s is left out: %s", entry.name, entry.origin, describe(error)
            )
    return cells


def _choose(
    cells: Iterable[_Cell], facts: Mapping[str, Any]
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """One importable cell per operation: those with a predicate first (they claim a special case),
    then in the order of distribution names; a core's cell comes last."""
    functions: dict[str, Callable[..., Any]] = {}
    origins: dict[str, str] = {}
    order = sorted(
        cells, key=lambda c: (not c.kernel.predicate, c.entry.is_core, c.entry.distribution)
    )
    for cell in order:
        if cell.operation in functions:
            logger.info(
                "kernel %s: %s is used, that of %s is not",
                cell.operation,
                origins[cell.operation],
                cell.entry.distribution,
            )
            continue
        try:
            if cell.kernel.predicate and not _import(cell.kernel.predicate)(facts):
                continue
            functions[cell.operation] = _import(cell.kernel.target)
            origins[cell.operation] = cell.entry.distribution
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.warning(
                "kernel %s of %s is left out: %s",
                cell.operation,
                cell.entry.origin,
                describe(error),
            )
    return functions, origins


def _import(target: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    function: Callable[..., Any] = found
    return function
