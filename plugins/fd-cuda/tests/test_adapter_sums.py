"""What gemm.cu's second group of warps finds, on the CPU: kernels/native/adapters.cuh as C++ over
an emulated GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import emulation
import numpy as np
import pytest
import torch

from fd_cuda.kernels import adapted
from fd_cuda.kernels.plans import Plan, Product

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
# epilogue, norm, rows, K, outputs of each part, slots, rank, BN, split, blocks that make sums
CASES = [
    ("plain", True, 64, 256, (64, 24, 40), 8, 16, 32, 2, 4),
    ("plain", False, 37, 1088, (40,), 5, 8, 64, 1, 1),
    ("gated", True, 70, 192, (32, 32), 3, 24, 32, 1, 3),
    ("add", False, 66, 1152, (32,), 5, 64, 32, 2, 4),
]


class Emulation(emulation.Emulation):
    header = "emulated_adapters.h"

    def _source(self, name: str) -> str:
        if name != "adapter_sums.cu":
            return super()._source(name)
        text = (emulation.HERE / name).read_text("utf-8")
        text = text.replace('#include "common.cuh"', f'#include "{self.header}"')
        return text.replace('#include "adapters.cuh"', super()._source("adapters.cuh"))


@pytest.mark.parametrize("case", CASES)
def test_rows_get_their_adapters_sums(case: tuple[Any, ...], tmp_path: Path) -> None:
    epilogue, has_norm, num_rows, depth, parts, slots, rank, columns, split, makers = case
    draw = torch.Generator().manual_seed(num_rows)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=draw) * spread).bfloat16()

    ends = tuple(np.cumsum(parts).tolist())
    each, width = len(parts) * rank, ends[-1]
    a, b = random(slots, each, depth, spread=depth**-0.5), random(slots, width, rank)
    x, norm = random(num_rows, depth + 8)[:, :depth], random(depth)
    plan = Plan("gemm", 8, 64, columns, 4, split)
    product = Product(epilogue, has_norm, width, depth, "bfloat16")
    shape = adapted.Shape(slots, rank, ends)
    blocks = adapted.num_blocks(plan, product, num_rows) * split
    defines = {
        **adapted.defines(product, shape), "HALF": 0, "NORM": int(has_norm), "BN": columns,
        "EPILOGUE": {"plain": 0, "add": 1, "gated": 2}[epilogue],
    }  # fmt: skip
    emulated = Emulation(tmp_path)
    kernel = emulated.function("adapter_sums", {**defines, "PARTS_OF_K": split, "SPLIT": blocks})
    meeting = torch.zeros(2, dtype=torch.int32)
    cut = adapted._cut(depth, shape)
    for turn in range(3):
        chosen = torch.randint(-1, slots, (num_rows,), generator=draw, dtype=torch.int32)
        if turn == 1:
            chosen.fill_(-1)
        if turn == 2:
            chosen.fill_(slots - 1)
        stale = torch.randint(-9, 99, (num_rows,), generator=draw, dtype=torch.int32)
        room = torch.full((cut.depths, num_rows, each), float("nan"))
        record = adapted._RECORD.pack(
            *(t.data_ptr() for t in (a, b, stale, room, meeting)), makers,
            *(*ends[:-1], 2**31 - 1, 2**31 - 1)[:2],
        )  # fmt: skip
        inner, added = torch.zeros(num_rows, each), torch.zeros(num_rows, width)
        arguments = [x, emulation.ctypes.c_longlong(x.stride(0)), norm, num_rows, width, depth]
        emulated.launch(
            kernel, (1, 1, blocks), 128, [*arguments, record, chosen, inner, added], cluster=blocks
        )
        seen = x.float() * norm.float() if has_norm else x.float()
        seen = seen.bfloat16().float()
        own = chosen.clamp(0).long()
        wanted = torch.einsum("trk,tk->tr", a.float()[own], seen)
        wanted[chosen < 0] = 0
        torch.testing.assert_close(inner, wanted, rtol=1e-4, atol=1e-4)
        more = torch.zeros(num_rows, width)
        for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            sums = wanted[:, part * rank : (part + 1) * rank]
            more[:, begin:end] = torch.einsum("tnr,tr->tn", b.float()[own, begin:end], sums)
        torch.testing.assert_close(added, more, rtol=1e-3, atol=1e-3)
        assert not meeting.any()
