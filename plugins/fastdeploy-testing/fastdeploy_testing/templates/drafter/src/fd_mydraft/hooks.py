"""Answers at start-up. Imports no tensor library."""

from __future__ import annotations

from fastdeploy_core.contracts import Requirements, hookimpl
from fastdeploy_core.contracts.speculative import SpeculativeQuestion

_SETTINGS = ("min_count",)


@hookimpl
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    if question.method != "mydraft":
        return None
    unknown = [key for key in question.options if key not in _SETTINGS]
    refusals = [f"unknown setting {key}; possible: {', '.join(_SETTINGS)}" for key in unknown]
    count = question.options.get("min_count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        refusals.append(f"min_count must be a whole number above 0, got {count!r:.40}")
    return Requirements(refusals=tuple(refusals))
