"""Plots of measured pages say what their tables say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """docs/plots.py."""
    spec = importlib.util.spec_from_file_location("docs_plots", ROOT / "docs" / "plots.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_plot_is_shown_by_its_page(plots: ModuleType) -> None:
    shown = {
        (page.relative_to(ROOT / "docs").as_posix(), (page.parent / target).resolve().name)
        for page in (ROOT / "docs").rglob("*.md")
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)", page.read_text())
    }
    assert shown == {(plot.page, name) for name, plot in plots.PLOTS.items()}


def test_a_table_is_read_with_its_empty_first_cells(plots: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| of | who | ms |\n|---|---|---|\n| a | us | **1,234.5** (2) |\n| | them | 7 % |\n"
        "| b | | 3 |\n\n| of | other |\n"
    )
    with pytest.raises(ValueError, match="unpack"):
        plots.read_table(page, "of")  # two tables begin so
    page.write_text(page.read_text().rpartition("\n\n")[0])
    rows = plots.read_table(page, "of")
    assert rows == [
        {"of": "a", "who": "us", "ms": "1,234.5 (2)"},
        {"of": "a", "who": "them", "ms": "7 %"},
        {"of": "b", "who": "", "ms": "3"},
    ]
    assert [plots.number(row["ms"]) for row in rows] == [1234.5, 7.0, 3.0]
    with pytest.raises(ValueError, match="no number in 'none'"):
        plots.number("none")


def test_bars_are_as_long_as_their_values(plots: ModuleType) -> None:
    svg = plots.draw("t", [("a", "x", 2.0), ("a", "y", 1.0), ("b & c", "x", 4.0)])
    widths = [float(w) for w in re.findall(rf'<rect x="{plots.LEFT}"[^>]* width="([\d.]+)"', svg)]
    bars = widths[:3]
    assert [width / bars[2] for width in bars] == [0.5, 0.25, 1.0]
    texts = [
        text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts == ["t", "a", "2", "1", "b & c", "4", "x", "y"]
    with pytest.raises(ValueError, match="no such rows"):
        plots.draw("t", [])
