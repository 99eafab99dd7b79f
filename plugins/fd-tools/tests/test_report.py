"""`fastdeploy plugins report`: what is in the file, and the page that reads it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from fd_tools import plugins_report

from fastdeploy_core.cli.main import main
from fastdeploy_core.plugins import discovery
from fastdeploy_core.plugins.report import table

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def alone(monkeypatch):
    """Only the core and the kit take part."""
    monkeypatch.setenv("FD_PLUGINS", "fastdeploy-testing")
    discovery.forget()
    yield
    monkeypatch.undo()
    discovery.forget()


@pytest.mark.slow  # doctor and the kit, in processes of their own
def test_a_report_holds_what_the_commands_found(alone, tmp_path, fd_tensor, capsys):
    path = tmp_path / "cpu.json"
    words = ("--tensor", fd_tensor, "-k", "limits_agree or test_memory_is", "--note", "a laptop")
    code = main(["plugins", "report", "cpu", *words, "--output", str(path)])
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert code == 0, printed
    passed, failed = plugins_report.counts(report)
    assert (passed > 0, failed) == (True, 0) and f"kit {passed} passed, 0 failed" in printed
    assert report["note"] == "a laptop" and report["distribution"].startswith("fastdeploy-core ")
    assert {row["verdict"] for row in report["doctor"]} == {"PASS"}
    assert report["kernels"]["used"] == {} and report["kernels"]["operations"] > 50
    private = (str(tmp_path), str(Path.home()) + "/", str(DOCS.parent))
    assert not any(words in path.read_text() for words in private), "a path of this machine"


def test_what_failed_makes_it_fail():
    good = {
        "doctor": [{"verdict": "PASS"}],
        "kit": {"suites": {"TestOps": {"passed": 3, "failed": 0}}},
        "kernels": {"used": {}, "operations": 60},
        "timings": {},
    }
    assert plugins_report.is_good(good)
    for part in (
        {"doctor": [{"verdict": "FAIL"}]},
        {"doctor": {"error": "killed"}},
        {"kit": {"error": "killed"}},
        {"kit": {"suites": {"TestOps": {"passed": 3, "failed": 1}}}},
        {"kit": {"suites": {}}},
        {"timings": {"error": "out of memory"}},
    ):
        assert not plugins_report.is_good(good | part), part
    assert "killed" in plugins_report.summary(good | {"kit": {"error": "killed"}})


def test_the_matrix_reads_reports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    page = importlib.import_module("devices_page")
    monkeypatch.setattr(page, "REPORTS", tmp_path)
    assert "None has come yet" in page._reports(table)
    report = {
        "format": plugins_report.FORMAT, "device": "acme", "date": "2026-11-28", "note": "A1",
        "distribution": "fd-acme 1.0", "keyword": "", "kernels": {"used": {"a": "x"},
        "operations": 60}, "kit": {"suites": {"T": {"passed": 7, "failed": 1}}},
        "timings": {"model": "m", "tokens_per_s_alone": 5.0, "tokens_per_s_of_eight": 9.0},
    }  # fmt: skip
    (tmp_path / "acme.json").write_text(json.dumps(report))
    shown = page._reports(table)
    for words in ("A1", "fd-acme 1.0", "7 passed, 1 failed", "1 of 60", "m: 5.0, 9.0"):
        assert words in shown, shown
    (tmp_path / "old.json").write_text(json.dumps(report | {"format": 0}))
    with pytest.raises(SystemExit, match="format 0"):
        page._reports(table)
