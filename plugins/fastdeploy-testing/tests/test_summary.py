"""What a run of the kit ends with when much of it fails."""

from __future__ import annotations

from fastdeploy_testing.summary import MAX_LINES, Outcome, capability_table, failure_lines


def case(test: str, outcome: str, reason: str = "", phase: str = "call") -> Outcome:
    return {
        "suite": "TestOps",
        "test": test,
        "capability": "",
        "phase": phase,
        "outcome": outcome,
        "reason": reason,
    }


def test_each_failed_test_is_one_line_with_its_first_case() -> None:
    outcomes = [
        case("test_norm[float32-1]", "passed"),
        case("test_norm[float32-7]", "failed", "off by 0.5"),
        case("test_norm[float16-7]", "failed", "off by 0.7"),
        case("test_norm[bfloat16-7]", "skipped", "not declared"),
        case("test_linear", "failed", "shape (1,), expected (2,)"),
        case("test_other", "skipped", "not declared"),
    ]
    assert failure_lines(outcomes, "odd") == [
        "test_norm: 2 of 3; [float32-7]: off by 0.5",
        "test_linear: 1 of 1; shape (1,), expected (2,)",
        "tracebacks: fastdeploy plugins check odd -v -k test_norm",
    ]


def test_a_fixture_that_fails_is_one_line_however_many_tests_need_it() -> None:
    outcomes = [case(f"test_{n}", "failed", "no chip", phase="setup") for n in range(900)]
    assert failure_lines(outcomes, "odd")[0] == "900 cases cannot be set up: no chip"
    assert len(failure_lines(outcomes, "odd")) == 2


def test_very_many_failures_are_cut_and_counted() -> None:
    outcomes = [case(f"test_{n}", "failed", "wrong") for n in range(MAX_LINES + 5)]
    lines = failure_lines(outcomes, "odd")
    assert len(lines) == MAX_LINES + 2 and lines[-2] == "and 5 more tests"
    assert failure_lines([case("test_a", "passed")], "odd") == []


def test_the_table_gives_the_reasons_of_failures_before_those_of_skips() -> None:
    outcomes = [case("test_a", "skipped", "not declared"), case("test_b", "failed", "off by 1")]
    header, row = capability_table(outcomes).splitlines()
    assert header.split() == ["capability", "result", "passed", "failed", "skipped", "reason"]
    assert row.split(maxsplit=5) == ["TestOps", "FAIL", "0", "1", "1", "off by 1"]
