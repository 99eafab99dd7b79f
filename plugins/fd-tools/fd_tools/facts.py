"""What an imported plugin declares, for `plugins show` and `plugins doctor`. Runs in the child
process that imports it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, Final

REPORT: Final = f"{__name__}:facts"  # as Job.report names it
# Class attributes that drivers declare; `option_docs` maps the driver's own settings to their
# meaning.
_SHOWN = (
    "contract",
    "unit",
    "capabilities",
    "limits",
    "can_capture_decode",
    "can_capture_mixed",
    "norms_heads",
    "features",
    "option_docs",
)


def facts(target: Any) -> dict[str, Any]:
    """The facts for `plugins show`: declared attributes, a table's operations, a module's hooks."""
    if isinstance(target, Mapping):
        missing = _missing_modules(target)
        return {"operations": sorted(map(str, target))} | (
            {"missing modules": missing} if missing else {}
        )
    found: dict[str, Any] = {}
    summary = (getattr(target, "__doc__", None) or "").strip().splitlines()
    if summary:
        found["summary"] = summary[0]
    for name in _SHOWN:
        value = getattr(target, name, None)
        if value is None or isinstance(value, property):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found[name] = dataclasses.asdict(value)
        elif isinstance(value, frozenset):
            found[name] = sorted(map(str, value))
        elif isinstance(value, str | int | float | bool | tuple | list | dict):
            found[name] = value
    hooks = [n for n in dir(target) if hasattr(getattr(target, n, None), "fastdeploy_impl")]
    if hooks:
        found["hooks"] = hooks
    return found


def _missing_modules(table: Any) -> dict[str, str]:
    """Operations of a kernel table whose module does not exist; the modules are not imported, for
    that may need hardware."""
    missing: dict[str, str] = {}
    for operation, cell in table.items():
        behind = getattr(cell, "behind", {})
        parts = (getattr(cell, name, "") for name in ("target", "predicate", "prepare"))
        targets = [cell] if isinstance(cell, str) else [*parts, *behind.values()]
        for module in (target.partition(":")[0] for target in targets if target):
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                missing[str(operation)] = module
    return missing
