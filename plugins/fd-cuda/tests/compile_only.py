"""Compile for a GPU what a step would launch, on a machine without one: `python compile_only.py
90`.

Triton's compiler needs no GPU, so a stand-in driver that only names the architecture lets every
launch become a compilation. The interpreter, which runs the same kernels on numbers, is more
tolerant.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Architecture:
    """What the compiler asks of the active driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> list[Any]:
    """From now on launches compile; returns the list that compiled kernels are added to."""
    driver.set_active(Architecture(capability))
    run, kernels = JITFunction.run, []

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    JITFunction.run = compiled
    return kernels


def main() -> int:
    """Every attention step of the tests, wide heads as models have, and layers with a state."""
    capability = int(sys.argv[1])
    knobs.runtime.interpret = False
    kernels = compile_only(capability)
    from attention_steps import compile_cases
    from state_steps import cases

    names: dict[str, int] = {}
    for case in (*compile_cases(capability), *cases()):
        case()
    for kernel in kernels:
        name = kernel.metadata.name
        names[name] = names.get(name, 0) + 1
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= 227 * 1024, (name, kernel.metadata.shared)
    sys.stdout.write(json.dumps(names) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
