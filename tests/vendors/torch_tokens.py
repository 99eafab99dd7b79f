"""Run by test_torch.py: greedy tokens of the demo model on torch, on the device that a probe picks.

python -m tests.vendors.torch_tokens MODEL NUM_TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.vendors.engines import engine, greedy

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 90))]


def main() -> None:
    """Print the tokens, and what a simulated device counted."""
    model, num_tokens = sys.argv[1:]
    with engine(Path(model), "", tensor_library="torch") as running:
        tokens = greedy(running, PROMPTS, int(num_tokens))
    simulated = getattr(torch.ops, "fd_simdevice", None)
    known = hasattr(simulated, "operations")
    counts = {
        "operations": sum(simulated.operations().values()) if known else 0,
        "late_copies": simulated.late_copies() if known else 0,
    }
    sys.stdout.write(json.dumps({"tokens": tokens, **counts}) + "\n")


if __name__ == "__main__":
    main()
