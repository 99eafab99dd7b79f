"""Documents are true: links lead somewhere, the request tour names code that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    p
    for p in sorted(ROOT.rglob("*.md"))
    if not {".nox", ".venv", "node_modules", ".git", ".pytest_cache"}
    & set(p.relative_to(ROOT).parts)
]
WITH_TESTS = [ROOT / "docs" / "explanation" / name for name in ("attacks.md", "checks.md")]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
STEP = re.compile(r"^\d+\. .+$", re.MULTILINE)
SYMBOL = re.compile(r"\(([^)#\s]+\.py)#([\w.]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        path = target.split("#")[0]
        if not path or "://" in path or path.startswith("mailto:"):
            continue
        if not (page.parent / path).exists():
            broken.append(target)
    assert not broken


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def test_request_tour_names_code_that_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    steps = STEP.findall(text)
    assert len(steps) == 10, f"the tour has {len(steps)} linked steps, not ten"
    for step in steps:
        linked = SYMBOL.findall(step)
        assert linked, f"no link in: {step}"
        for file, symbol in linked:
            assert symbol in _defined(ROOT / file), f"{file} defines no {symbol}"


def test_request_tour_passes_no_file_twice() -> None:
    """A step can be followed from file to file, in one direction."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    files = [file for step in STEP.findall(text) for file, _ in SYMBOL.findall(step)]
    assert len(files) > 15
    assert not {file for file in files if files.count(file) > 1}


@pytest.mark.parametrize("page", WITH_TESTS, ids=lambda page: page.stem)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|plugins)/[\w/.-]+\.py)::(test_\w+)`", page.read_text("utf-8"))
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert len(named) > 30 and not missing
