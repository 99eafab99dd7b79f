"""Run as a program by test_loader.py: loads a checkpoint and prints what it took, as JSON.

    python load_memory.py FOLDER LIBRARY

A process of its own: memory that earlier work left with the allocator would hide or add some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdeploy_core.loading import loader
from fastdeploy_core.tensor import load
from tests.paged import PagedModel


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon")).split()[1]) * 1024


def main() -> None:
    """Load, watching memory after every tensor."""
    seen: list[int] = []
    take = loader.Checkpoint._tensors

    def watched(self: Any) -> Iterator[Any]:
        for item in take(self):
            yield item
            seen.append(anonymous())

    loader.Checkpoint._tensors = watched
    xp = load(sys.argv[2])
    xp.linear(xp.zeros((2, 64)), xp.zeros((64, 64)))  # the library's own start is not the loader's
    before = anonymous()
    model = PagedModel(Path(sys.argv[1]), sys.argv[2])
    weight_bytes = model.loaded.weight_bytes
    sys.stdout.write(json.dumps({"peak": max(seen) - before, "weights": weight_bytes}))


if __name__ == "__main__":
    main()
