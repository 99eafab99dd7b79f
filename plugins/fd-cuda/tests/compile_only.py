"""Compile for a GPU what a step would launch, on a machine without one: `python compile_only.py
90`.

Triton's compiler needs no GPU, so a stand-in driver that only names the architecture lets every
launch become a compilation. The interpreter, which runs the same kernels on numbers, is more
tolerant.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from fastdeploy_core.devices.host_device import usable_cores
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


# Bytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def products(capability: int) -> Iterator[Callable[[], Any]]:
    """Every packed format, dense and as experts, as cards without native kernels read it;
    experts in half floats, and clamped ones in MXFP4; few rows and many."""
    from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
    from fd_quant_formats.mxfp4 import FORMAT as MXFP4
    from packed_weights import packed

    from fd_cuda.kernels import experts, quant_any
    from fd_cuda.kernels.routing import Order

    def order(tiles: Any, rows: int) -> Any:
        blocks = 1 + rows // tiles.rows
        slots = torch.zeros(blocks * tiles.rows, dtype=torch.int32)
        return Order(slots, torch.zeros(blocks, dtype=torch.int32))

    for rows in (1, 40, 300):
        x = torch.zeros((rows, 384), dtype=torch.bfloat16)
        for name in FORMATS:
            group = 64 if name.startswith("wint4") else 0
            weights = [packed(name, 128, 384, group, count, "cpu") for count in (0, 2)]

            def case(x=x, weights=weights, rows=rows):
                quant_any.linear(x, weights[0], None)
                tiles = quant_any.tiles_for(rows, x.dtype)
                quant_any.grouped(x, weights[1], order(tiles, rows), tiles, rows, 1)

            yield case

        def plain(x=x, rows=rows):
            weight = torch.zeros((2, 256, 384), dtype=torch.bfloat16)
            tiles = experts.tiles_for(rows, 1, 2, x.dtype)
            for gated in (True, False):
                experts.grouped(x, weight, order(tiles, rows), tiles, rows, 1, gated=gated)

        def clamped(x=x, rows=rows):
            own = (quant_any.tiles_for(rows, x.dtype), *(tiles for _, tiles in quant_any.CLAMPED))
            for depth, tiles in itertools.product((384, 96), own):
                shapes = (depth // 2, depth // 32)
                codes, scales = (torch.zeros((2, 128, n), dtype=torch.uint8) for n in shapes)
                held = {"weight": codes, "scale": scales}
                packed_experts = PackedWeight(MXFP4, 128, depth, held, 2, 32)
                for weight in (packed_experts, torch.zeros((2, 128, depth), dtype=x.dtype)):
                    given = (order(tiles, rows), tiles, rows, 1, x)
                    quant_any.grouped(x[:, :depth], weight, *given, (1.7, 7.0))
                    quant_any.grouped(x[:, :depth], weight, *given)

        yield plain
        yield clamped


def towers(capability: int) -> Iterator[Callable[[], Any]]:
    """Packed attention, where it is served: heads in one part and in two."""
    from fd_cuda.attention import packed

    for width in (64, 72, 80, 128) if capability == 90 else ():
        q = torch.zeros((200, 2, width), dtype=torch.bfloat16)
        starts = torch.tensor([0, 100, 200], dtype=torch.int32)
        yield partial(packed.attend, q, q, q, starts, 100)


def adapters(capability: int) -> Iterator[Callable[[], Any]]:
    """What adapters add to products of one part and of three, of few rows and of many, and to
    routed experts."""
    from fd_cuda.kernels.expert_lora import lora_experts
    from fd_cuda.kernels.lora import lora

    x = torch.zeros((300, 512), dtype=torch.bfloat16)
    for rank, ends in ((16, (512,)), (64, (256, 384, 512)), (256, (512,))):
        a = torch.zeros((4, len(ends) * rank, 512), dtype=x.dtype)
        b, slots = torch.zeros((4, 512, rank), dtype=x.dtype), torch.zeros(300, dtype=torch.int32)
        for rows in (8, 300):
            few = x[:rows]
            yield partial(lora, few, few, x[0], 1e-6, a, b, ends, slots[:rows])
            ids = torch.zeros((rows, 2), dtype=torch.int64)
            y = torch.zeros((2 * rows, 512), dtype=x.dtype)
            yield partial(lora_experts, y, few, a, b, ends, slots[:rows], ids, 2)


def compile_share(capability: int, part: int, parts: int) -> tuple[Counter[str], list[str]]:
    """Every `parts`th case from `part` on: kernels by name, and what is wrong with some."""
    knobs.runtime.interpret = False
    kernels = compile_only(capability)
    from attention_steps import compile_cases
    from state_steps import cases

    every = (*compile_cases(capability), *cases(), *products(capability), *towers(capability))
    every += tuple(adapters(capability))
    for case in every[part::parts]:
        case()
    wrong = []
    for kernel in kernels:
        name, shared = kernel.metadata.name, kernel.metadata.shared
        if not kernel.asm.get("cubin"):
            wrong.append(f"{name}: no machine code")
        if shared > SHARED[capability] * 1024:
            wrong.append(f"{name}: {shared} bytes of shared memory, {SHARED[capability]} KiB are")
    return Counter(kernel.metadata.name for kernel in kernels), wrong


def main() -> int:
    """Every attention step of the tests, wide heads as models have, layers with a state, and
    products, on as many processes as there are cores; 1 where one does not compile, or needs more
    shared memory than the card has."""
    capability, parts = int(sys.argv[1]), usable_cores()
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, capability, part, parts) for part in range(parts)]
        found = [share.result() for share in shares]
    names = sum((own for own, _ in found), Counter())
    wrong = [line for _, own in found for line in own]
    sys.stdout.write(json.dumps(names) + "\n")
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
