"""Numbers of a benchmark: percentiles, a table for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(
    name: str, seconds: Sequence[float], percents: Sequence[float] = PERCENTILES
) -> dict[str, float]:
    """Mean and percentiles of durations, in milliseconds."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    rows = {f"mean_{name}_ms": mean * 1000}
    for percent in percents:
        rows[f"p{percent:g}_{name}_ms"] = percentile(seconds, percent) * 1000
    return {key: round(value, 3) for key, value in rows.items()}


def show(title: str, rows: Mapping[str, Any]) -> None:
    """A table on standard output."""
    print(f"== {title}")
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else f"{value}"
        print(f"{name:<{width}}  {shown:>14}")


def save(path: str | None, result: Any, folder: str = "") -> None:
    """The same numbers as JSON, when a file was asked for; where no name is given, the time is."""
    if path is None:
        return
    file = Path(folder, path)
    if not path or file.is_dir():
        file /= time.strftime("fastdeploy-bench-%Y%m%d-%H%M%S.json")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    print(f"written to {file}")
