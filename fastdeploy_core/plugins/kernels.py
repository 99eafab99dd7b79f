"""The kernel table of one device: for each operation, the function that layers will call.

Cells come from every distribution's table for that device; the reference provides the rest. Choices
are made once, when layers are built.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.contracts.ops import KERNEL_SIZES, OPERATIONS, QUANTIZED_OPERATIONS, Kernel
from fastdeploy_core.errors import CapabilityError, PluginError

from .discovery import PluginEntry, discover
from .drivers import load, part
from .preflight_child import describe

if TYPE_CHECKING:
    from fastdeploy_core.config import ModelConfig
    from fastdeploy_core.config.engine import DeviceConfig

    from .resolve import ResolvedPlugins

logger = logging.getLogger(__name__)

REFERENCE: Final = "cpu"  # the device name under which the reference registers its table
# A plugin's number format adds operations of these names.
_OF_FORMATS: Final = ("linear_", "moe_experts_")


@dataclass(frozen=True, slots=True)
class _Cell:
    operation: str
    kernel: Kernel
    entry: PluginEntry


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """What became of one cell of a table, for `fastdeploy plugins why kernels`."""

    operation: str
    distribution: str
    is_used: bool
    reason: str  # the target of one that is used; else why it is not


def kernel_facts(model: ModelConfig, tensor_library: str) -> dict[str, Any]:
    """What cells are asked with: contracts.ops.KERNEL_FACTS, those that the model has."""
    sizes = {name: model.hf_config.get(name) for name in KERNEL_SIZES}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if not sizes["head_dim"] and isinstance(heads, int) and heads and isinstance(hidden, int):
        sizes["head_dim"] = hidden // heads
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return {"tensor_library": tensor_library, "dtype": model.dtype, **known}


@dataclass(slots=True)
class _Chosen:
    """Operations with their functions, their distributions, and their weight layouts."""

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    prepare: dict[str, Callable[..., Any]] = field(default_factory=dict)
    formats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    activations: dict[str, str] = field(default_factory=dict)
    behind: dict[str, dict[str, Callable[..., Any]]] = field(default_factory=dict)
    cells: list[CellVerdict] = field(default_factory=list)

    def decide(self, cell: _Cell, reason: str = "") -> None:
        """Note that the cell is used, or the reason why not."""
        verdict = CellVerdict(
            cell.operation, cell.entry.distribution, not reason, reason or cell.kernel.target
        )
        self.cells.append(verdict)


class _Problems:
    """What is wrong with cells; each is a warning, too."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, what: str, entry: PluginEntry, problem: str) -> None:
        self.lines.append(f"{what} of {entry.origin} {problem}")
        logger.warning("%s", self.lines[-1])


class ChosenKernels:
    """A KernelTable: operations by name, already chosen and imported.

    `late` operations exist only in the reference, and few models need them. The first layer that
    asks for one causes the line about falling back, or the refusal. `problems` are cells that
    are left out and cells that no layer asks for, with the reason.
    """

    def __init__(
        self, device: str, chosen: _Chosen, late: Iterable[str] = (), allow_fallback: bool = True
    ) -> None:
        self.device = device
        self.functions, self._origins = chosen.functions, chosen.origins
        self._prepare, self._composed = chosen.prepare, set[str]()
        self._formats, self._activations = chosen.formats, chosen.activations
        self._behind = chosen.behind
        self._late, self._allow_fallback = set(late), allow_fallback
        self.fallbacks: list[str] = []  # late operations that layers asked for
        self.problems: tuple[str, ...] = ()
        self.cells = chosen.cells

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation; KeyError names the operations there are."""
        if operation in self._late:
            self._fall_back(operation)
        try:
            return self.functions[operation]
        except KeyError:
            raise KeyError(
                f"device {self.device!r} has no kernel for {operation!r}; "
                f"there are: {', '.join(sorted(self.functions))}"
            ) from None

    def _fall_back(self, operation: str) -> None:
        if not self._allow_fallback:
            raise CapabilityError(
                f"device {self.device!r} has no kernel {operation} and fallback is switched off; "
                "allow the reference (drop --no-fallback), choose another --quantization or "
                "--kv-cache-dtype, or install a plugin that provides the kernel"
            )
        self._late.discard(operation)
        self.fallbacks.append(operation)
        logger.info(
            "device %s has no kernel %s: the reference serves it, which is slower",
            self.device,
            operation,
        )

    def add(self, operation: str, function: Callable[..., Any], distribution: str) -> None:
        """Add an operation that is composed of others."""
        self._composed.add(operation)
        self.functions[operation], self._origins[operation] = function, distribution

    def prepare(self, operation: str, weight: Any) -> Any:
        """The weight in the chosen cell's layout; the weight itself if the cell has none. Products
        that are composed of others multiply with "linear"."""
        prepare = self._prepare.get("linear" if operation in self._composed else operation)
        return weight if prepare is None else prepare(weight)

    def takes(self, operation: str, format_name: str) -> bool:
        """Whether the plain operation takes weights of that internal format."""
        plain = "linear" if operation in self._composed else operation
        return format_name in self._formats.get(plain, ())

    def activations(self, operation: str) -> str:
        """How the chosen cell rounds activations that its format does not round."""
        return self._activations.get(operation, "")

    def behind(self, operation: str, before: str) -> Callable[..., Any] | None:
        """A function that fuses operation `before` with what the cell does to its x first."""
        return self._behind.get(operation, {}).get(before)

    def __contains__(self, operation: object) -> bool:
        """Whether there is a kernel for the operation."""
        return operation in self.functions

    def origins(self) -> Mapping[str, str]:
        """For the start-up report: operation -> distribution it came from."""
        return dict(self._origins)


def build_kernel_table(
    device_name: str,
    facts: Mapping[str, Any] | None = None,
    asked: DeviceConfig | None = None,
    *,
    resolved: ResolvedPlugins | None = None,
) -> ChosenKernels:
    """Choose a kernel for every operation.

    Predicates of cells are called with `facts` (dtype, head_dim, ...) and the objective that was
    asked for. With asked.allow_fallback=False an operation that only the reference has is a
    CapabilityError.
    """
    entries = discover().of("kernels") if resolved is None else resolved.plugin_entries("kernels")
    facts = {"objective": asked.kernel_objective if asked else ""} | dict(facts or {})
    allow_fallback = asked is None or asked.allow_fallback
    problems = _Problems()
    is_new = resolved is None  # what was resolved was imported in a child process before
    own = _cells([e for e in entries if e.name == device_name], problems, is_new)
    of_reference = [e for e in entries if e.name == REFERENCE and device_name != REFERENCE]
    reference = _cells(of_reference, problems, is_new)
    chosen = _choose([c for c in own if not c.kernel.composes], facts, problems)
    composing = [c for c in (*own, *reference) if c.kernel.composes]
    missing = [c for c in reference if c.operation not in chosen.functions]
    rest = _choose([c for c in missing if not c.kernel.composes], facts, problems)
    late = rest.functions.keys() - OPERATIONS.keys()
    fallback = rest.functions.keys() & OPERATIONS.keys()
    total = len((chosen.functions.keys() | fallback) & OPERATIONS.keys())
    if fallback and not allow_fallback:
        raise CapabilityError(
            f"device {device_name!r} lacks {len(fallback)} of {total} "
            f"kernels and fallback is switched off: {', '.join(sorted(fallback))}; "
            "allow the reference (drop --no-fallback) or install a plugin that provides them"
        )
    if fallback:
        logger.info(
            "device %s: %d of %d operations run on the reference kernels: %s",
            device_name,
            len(fallback),
            total,
            ", ".join(sorted(fallback)),
        )
    both = _Chosen(
        chosen.functions | rest.functions,
        chosen.origins | rest.origins,
        chosen.prepare | rest.prepare,
        chosen.formats | rest.formats,
        chosen.activations | rest.activations,
        chosen.behind | rest.behind,
        chosen.cells + rest.cells,
    )
    for cell in reference:
        if cell.operation in chosen.functions:
            both.decide(cell, f"that of {chosen.origins[cell.operation]} is used")
    table = ChosenKernels(device_name, both, late, allow_fallback)
    _compose(table, composing, facts, problems)
    table.problems = tuple(problems.lines)
    if asked and asked.capture_shapes:
        part("shapes", "--capture-shapes")(asked.capture_shapes, table)
    return table


def _compose(
    table: ChosenKernels, cells: Iterable[_Cell], facts: Mapping[str, Any], problems: _Problems
) -> None:
    """Add operations without a kernel of their own, composed of the table's other kernels."""
    for cell in cells:
        if cell.operation in table:
            used = table.origins()[cell.operation]
            reason = f"that of {used} is used"
            table.cells.append(CellVerdict(cell.operation, cell.entry.distribution, False, reason))
            continue
        try:
            found = _choose([cell], facts, problems)
            for operation, make in found.functions.items():
                table.add(operation, make(table), cell.entry.distribution)
            table.cells += found.cells
        except Exception as error:
            problems.add(f"kernel {cell.operation}", cell.entry, f"is left out: {describe(error)}")


def _cells(entries: Iterable[PluginEntry], problems: _Problems, is_new: bool) -> list[_Cell]:
    """The cells of all tables; a table that cannot be read is left out with a warning."""
    cells = []
    for entry in entries:
        try:
            table = load(entry, preflight=is_new)
            if not isinstance(table, Mapping):
                raise TypeError(f"a kernel table maps operations to targets, got {type(table)}")
            for operation, value in table.items():
                if near := misspelt(operation):
                    what = f"is used by no layer: did you mean {near}?"
                    problems.add(f"kernel {operation}", entry, what)
                kernel = Kernel(value) if isinstance(value, str) else value
                if not isinstance(kernel, Kernel):
                    raise TypeError(f"{operation}: expected 'module:function' or Kernel")
                cells.append(_Cell(operation, kernel, entry))
        except (PluginError, TypeError) as error:
            problems.add(f"kernel table {entry.name!r}", entry, f"is left out: {describe(error)}")
    return cells


def is_operation(name: str) -> bool:
    """Whether layers may ask for it: an operation of this core or of a plugin's number format."""
    return (
        name in OPERATIONS
        or name in QUANTIZED_OPERATIONS
        or (name.startswith(_OF_FORMATS) and not misspelt(name))
    )


def misspelt(operation: str) -> str:
    """The operation of this core that was probably meant; "" for a known name and for one that a
    plugin's own code may ask for."""
    if operation in OPERATIONS or operation in QUANTIZED_OPERATIONS:
        return ""
    cutoff = 0.93 if operation.startswith(_OF_FORMATS) else 0.8
    near = difflib.get_close_matches(operation, OPERATIONS, n=1, cutoff=cutoff)
    return near[0] if near else ""


def _choose(cells: Iterable[_Cell], facts: Mapping[str, Any], problems: _Problems) -> _Chosen:
    """One importable cell per operation: cells for the objective come first and those for another
    one last, then cells with a predicate (they claim a special case), then the order of
    distribution names; the core's cells come last."""
    chosen = _Chosen()
    ranks = {facts.get("objective", ""): 0, "": 1}  # nothing asked for: 1 for what says nothing

    def place(cell: _Cell) -> tuple[object, ...]:
        kernel, entry = cell.kernel, cell.entry
        rank = ranks.get(kernel.objective, 2)
        return rank, not kernel.predicate, entry.is_core, entry.distribution

    order = sorted(cells, key=place)
    for cell in order:
        if cell.operation in chosen.functions:
            used = chosen.origins[cell.operation]
            logger.info(
                "kernel %s: %s is used, that of %s is not",
                cell.operation,
                used,
                cell.entry.distribution,
            )
            chosen.decide(cell, f"that of {used} is used")
            continue
        denied = next((deny for deny in cell.kernel.denies if deny.matches(facts)), None)
        if denied is not None:
            logger.info(
                "kernel %s of %s is not used: %s",
                cell.operation,
                cell.entry.distribution,
                denied.reason,
            )
            chosen.decide(cell, f"denied: {denied.reason}")
            continue
        try:
            if cell.kernel.predicate and not _import(cell.kernel.predicate)(facts):
                chosen.decide(cell, f"{cell.kernel.predicate} says no")
                continue
            prepare = _import(cell.kernel.prepare) if cell.kernel.prepare else None
            behind = {before: _import(target) for before, target in cell.kernel.behind.items()}
            chosen.functions[cell.operation] = _import(cell.kernel.target)
            chosen.behind[cell.operation] = behind
            chosen.origins[cell.operation] = cell.entry.distribution
            chosen.activations[cell.operation] = cell.kernel.activations
            if prepare is not None:
                chosen.prepare[cell.operation] = prepare
                chosen.formats[cell.operation] = cell.kernel.formats
            chosen.decide(cell)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problems.add(f"kernel {cell.operation}", cell.entry, f"is left out: {describe(error)}")
            chosen.decide(cell, f"cannot be loaded: {describe(error)}")
    return chosen


def _import(target: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    function: Callable[..., Any] = found
    return function
