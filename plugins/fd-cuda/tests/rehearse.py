"""Meets the kernels of a step before any may run, on a machine without a GPU: `python rehearse.py
90`.

Prints how many were compiled inside, by how many threads, how many outside afterwards, and whether
what they would have written is zero.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
from compile_only import Architecture
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def allocated() -> list[torch.Tensor]:
    """Every way in which memory without values is asked for."""
    one = torch.ones(999)
    ways = (torch.empty(999), torch.empty_like(one), one.new_empty(999))
    return [*ways, torch.empty_strided((999,), (1,))]


def main() -> int:
    """Twice the same step: met once, then launched as far as that goes without a GPU."""
    knobs.runtime.interpret = False
    driver.set_active(Architecture(int(sys.argv[1])))
    from attention_steps import compile_cases

    from fd_cuda.kernels import rehearsal

    threads: list[int] = []

    def listen(**_: Any) -> None:
        threads.append(threading.get_ident())

    knobs.compilation.listener = listen
    case = list(compile_cases(90))[8]  # a float32 model, whose kernels are quickly compiled
    run = JITFunction.run
    with rehearsal.compile_only():
        (out, _), x = case(), torch.full((999,), float("nan"))
        del x  # whose memory is likely to be given out next
        is_zero = not out.any() and not any(empty.any() for empty in allocated())
        assert rehearsal.is_on()
    assert JITFunction.run is run and not rehearsal.is_on()
    inside = len(threads)

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = warm
    case()
    found = {
        "inside": inside,
        "threads": len({*threads[:inside]} - {threading.get_ident()}),
        "outside": len(threads) - inside,
        "is_zero": bool(is_zero),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
