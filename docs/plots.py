"""Bar charts of the measured pages, each from a table of its page, so that both say the same.

`docs/generate.py` writes them; its --check compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
COLOURS = ("#1f5fbf", "#f28e2b", "#59a14f", "#9c6bbf", "#8a8a8a")
WIDTH, LEFT, RIGHT, BAR, GAP = 720, 210, 90, 15, 12

Row = dict[str, str]
Bar = tuple[str, str, float]  # group, series, value


def read_table(page: Path, first: str) -> list[Row]:
    """Rows of the page's table whose first header cell is `first`, by header; an empty cell of the
    first columns means what stands above it, up to the first cell that is not empty."""
    lines = page.read_text().splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    header, rows, above = _cells(lines[start]), list[Row](), list[str]()
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        for column, cell in enumerate(cells):
            if cell or not above:
                break
            cells[column] = above[column]
        rows.append(dict(zip(header, cells, strict=True)))
        above = cells
    return rows


def _cells(line: str) -> list[str]:
    return [re.sub(r"[*`]", "", cell).strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str) -> float:
    """The first number of a cell; ValueError if it has none."""
    found = NUMBER.search(cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    return float(found.group().replace(",", ""))


def by_row(
    group: str, series: str, value: str, only: tuple[str, ...]
) -> Callable[[Row], list[Bar]]:
    """One bar a row, where the column `series` says one of `only`."""

    def bars(row: Row) -> list[Bar]:
        return [(row[group], row[series], number(row[value]))] if row[series] in only else []

    return bars


def by_column(
    group: Callable[[Row], str], columns: tuple[str, ...], names: tuple[str, ...] = ()
) -> Callable[[Row], list[Bar]]:
    """One bar for each of these columns, called `names`; rows whose group is "" are left out."""

    def bars(row: Row) -> list[Bar]:
        if not group(row):
            return []
        pairs = zip(names or columns, columns, strict=True)
        return [(group(row), name, number(row[column])) for name, column in pairs]

    return bars


@dataclass(frozen=True)
class Plot:
    """One chart: bars of a table's rows, in the order in which they stand there."""

    page: str
    table: str  # its first header cell
    title: str
    bars: Callable[[Row], list[Bar]]
    line: float = 0.0  # a value that is marked

    def svg(self) -> str:
        """The chart."""
        rows = read_table(DOCS / self.page, self.table)
        return draw(self.title, [bar for row in rows for bar in self.bars(row)], self.line)


def draw(title: str, bars: list[Bar], line: float = 0.0) -> str:
    """Horizontal bars, those of a group beside each other, with their values."""
    if not bars:
        raise ValueError(f"{title}: the table has no such rows")
    series = list(dict.fromkeys(name for _, name, _ in bars))
    longest = max(value for _, _, value in bars)
    scale = (WIDTH - LEFT - RIGHT) / longest
    body, y, last = list[str](), 62, ""
    for group, name, value in bars:
        if group != last:
            y += GAP if last else 0
            body.append(
                f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(group)}</text>'
            )
            last = group
        colour, width = COLOURS[series.index(name) % len(COLOURS)], value * scale
        body.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>'
        )
        body.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + 11}">{value:,g}</text>')
        y += BAR
    if line:
        x = LEFT + line * scale
        body.append(f'<path d="M{x:.1f} 54V{y + 4}" stroke="#333" stroke-dasharray="4 3"/>')
    x = LEFT
    for index, name in enumerate(series if len(series) > 1 else []):
        colour = COLOURS[index % len(COLOURS)]
        body.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{colour}"/>')
        body.append(f'<text x="{x + 16}" y="44">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14}" '
        f'viewBox="0 0 {WIDTH} {y + 14}" font-family="sans-serif" font-size="12">'
    )
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    heading = f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, back, heading, *body, "</svg>"]) + "\n"


BATCHES = ("batch 1", "batch 8", "batch 32", "batch 128")
TASKS = ("decode 1", "decode 8", "decode 32", "prefill 512", "prefill 2048")
PLOTS = {
    "reference.svg": Plot(
        "performance.md",
        "32 requests, demo model, float32",
        "Output tokens per second on two cores (more is better)",
        by_column(lambda row: row["32 requests, demo model, float32"], ("tokens/s (min to max)",)),
    ),
    "cpu.svg": Plot(
        "performance-cpu.md",
        "times llama.cpp's, tokens/s",
        "ERNIE-4.5-0.3B, two Intel cores with AMX: times llama.cpp's tokens/s (more is better)",
        by_column(
            lambda row: (
                name if (name := row["times llama.cpp's, tokens/s"]).startswith("ERNIE") else ""
            ),
            TASKS,
        ),
        line=1.0,
    ),
    "cuda.svg": Plot(
        "performance-cuda.md",
        "decode, ms per step",
        "One H200, 64 sequences: milliseconds per decode step (less is better)",
        by_row("decode, ms per step", "engine", "batch 64", ("fd-cuda", "vLLM")),
    ),
    "cuda-quantized.svg": Plot(
        "performance-cuda-quantized.md",
        "8192x8192",
        "One linear layer of 8192 x 8192, 8 rows, one H200: microseconds (less is better)",
        by_column(lambda row: row["8192x8192"], ("8",)),
    ),
    "cuda-serving.svg": Plot(
        "serving-cuda.md",
        "ERNIE-4.5-0.3B",
        "One H200, ERNIE-4.5-0.3B over HTTP: output tokens per second (more is better)",
        by_column(
            lambda row: label if "rounds" not in (label := row["ERNIE-4.5-0.3B"]) else "",
            ("output tokens/s",),
        ),
    ),
    "quantization.svg": Plot(
        "quantization.md",
        "ERNIE-4.5-300B-A47B in",
        "ERNIE-4.5-300B-A47B: GB of weights (less is better)",
        by_column(lambda row: row["ERNIE-4.5-300B-A47B in"], ("total, GB",)),
    ),
    "speculative.svg": Plot(
        "how-to/speculative-decoding.md",
        "on one H200",
        "Demo model, one H200, answers of 800 tokens: times the pace without drafts",
        by_column(
            lambda row: (
                f"{row['on one H200']}, up to {row['k']}"
                if row["answers"] == "decoding" and row["k"]
                else ""
            ),
            BATCHES,
        ),
        line=1.0,
    ),
}
