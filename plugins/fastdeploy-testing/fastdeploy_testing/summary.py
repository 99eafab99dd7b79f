"""The end of a run of the kit: a table of capabilities, and one line for each failed test.

A test has many cases (dtypes, shapes). A wrong kernel fails most of them and also tests of
operations that are composed of it. So each test gets one line.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_core.plugins.report import table

Outcome = dict[str, str]  # suite, test, capability, phase, outcome, reason; see pytest_plugin.py
MAX_LINES = 20


def capability_table(outcomes: Sequence[Outcome]) -> str:
    """One row for each capability, or for the suite if a test belongs to none."""
    suites: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        suites.setdefault(outcome["capability"] or outcome["suite"], []).append(outcome)
    rows = []
    for name, tests in suites.items():
        counts = {o: sum(t["outcome"] == o for t in tests) for o in ("passed", "failed", "skipped")}
        verdict = "FAIL" if counts["failed"] else "PASS" if counts["passed"] else "not declared"
        shown = "failed" if counts["failed"] else "skipped"
        reasons = dict.fromkeys(t["reason"] for t in tests if t["outcome"] == shown)
        rows.append((name, verdict, *counts.values(), "; ".join(reasons)[:160]))
    return table(("capability", "result", "passed", "failed", "skipped", "reason"), rows)


def failure_lines(outcomes: Sequence[Outcome], driver: str) -> list[str]:
    """One line for each failed test with its first failed case, and what to run next."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in (o for o in outcomes if o["outcome"] == "failed"):
        # A fixture that fails, such as a device that cannot be made, fails all its tests alike.
        is_fixture = outcome["phase"] == "setup"
        key = outcome["reason"] if is_fixture else f"{outcome['suite']}.{_name(outcome)}"
        groups.setdefault(key, []).append(outcome)
    if not groups:
        return []
    lines = []
    for failed in groups.values():
        first = failed[0]
        if first["phase"] == "setup":
            lines.append(f"{len(failed)} cases cannot be set up: {first['reason']}")
            continue
        ran = [o for o in outcomes if o["outcome"] != "skipped" and o["suite"] == first["suite"]]
        cases = [o for o in ran if _name(o) == _name(first)]
        case = first["test"].removeprefix(_name(first))
        which = f" {case}:" if case else ""
        lines.append(f"{_name(first)}: {len(failed)} of {len(cases)};{which} {first['reason']}")
    more = len(lines) - MAX_LINES
    lines = lines[:MAX_LINES] + ([f"and {more} more tests"] if more > 0 else [])
    name = _name(next(iter(groups.values()))[0])
    return [*lines, f"tracebacks: fastdeploy plugins check {driver} -v -k {name}"]


def _name(outcome: Outcome) -> str:
    """The test's function, without the case."""
    return outcome["test"].partition("[")[0]
