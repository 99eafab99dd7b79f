"""Launches every hand-written kernel of this plugin a few times on odd shapes, for
compute-sanitizer:

    compute-sanitizer --tool memcheck python plugins/fd-cuda/tests/every_kernel.py
    compute-sanitizer --tool racecheck python plugins/fd-cuda/tests/every_kernel.py [--plain-copies]
    [PART...]

A part is a function below or a format of packed weights. Shapes are small and their ends lie inside
tiles. Results are not compared, which the tests do; here the tool watches every access. The last
lines name what was launched.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention_steps import MIXED, Step, gqa, mla
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.kv_formats import KV_FORMATS
from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.quant_formats import FORMATS
from launches import copy_plainly, count_launches, never_launched
from packed_weights import packed
from ranks_in_turn import RanksInTurn
from state_steps import cases
from test_clamped import matrices

from fastdeploy_testing.drivers import build_kernel_table, lookup
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.latent.driver import LatentAttention
from fd_cuda.attention.plan import StreamShape
from fd_cuda.attention.quantized import QuantizedAttention
from fd_cuda.attention.tuning import Sizes
from fd_cuda.kernels import (
    filtering,
    linear,
    matmul,
    native,
    quant_any,
    quant_blocks,
    quant_cache,
    quant_experts,
    quant_fused,
    quant_linear,
    quant_native,
    quant_trellis,
    quant_weights,
    routing,
)
from fd_cuda.kernels.cache import move_blocks, sum_blocks
from fd_cuda.kernels.plans import Plan
from fd_cuda.kernels.quant_persistent import persistent_product
from fd_cuda.kernels.quant_round import fp8_blocks
from fd_cuda.kernels.quant_shapes import Few, Tile, blocks, persistent
from fd_cuda.kernels.trellis_native import Gemv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, device=DEVICE).to(dtype)


def native_products() -> None:
    """Small products in CUDA C++: every kind of epilogue, numbers of rows around those of a
    tile."""
    for dtype in DTYPES[:2]:
        for width, depth in ((392, 512), (104, 1024)):
            weight, norm = random(width, depth, dtype=dtype), random(depth, dtype=dtype)
            for rows in (1, 3, 9, 16):
                for plan in (Plan("gemv", warps=w) for w in (2, 8, 16)):
                    product(plan, rows, weight, norm if dtype == torch.bfloat16 else None)
            for rows in (1, 17, 65, 130):
                for plan in (
                    Plan("gemm", 8, 64, 32, 4, 2),
                    Plan("gemm", 8, 64, 64, 4, 8),
                    Plan("gemm", 8, 128, 128, 4, 1),
                ):
                    product(plan, rows, weight, norm if dtype == torch.bfloat16 else None)


def product(plan: Plan, rows: int, weight: torch.Tensor, norm: torch.Tensor | None) -> None:
    width, depth = weight.shape
    x = random(rows, depth + 8, dtype=weight.dtype)[:, :depth]
    bias, residual = random(width, dtype=x.dtype), random(rows, width, dtype=x.dtype)
    linear.compute(plan, "plain", x, norm, EPS, weight, bias, None)
    linear.compute(plan, "gated", x, norm, EPS, weight, None, None)
    linear.compute(plan, "add", x, None, EPS, weight, bias, residual)


def native_filter() -> None:
    for width in (50, 5000, 20011):
        kept(filtering.filter_logits, width, 5)


def triton_filter() -> None:
    """What runs where there are no clusters."""
    has_wgmma, native.has_wgmma = native.has_wgmma, lambda: False
    try:
        for width in (7, 600, 5000):
            kept(filtering.filter_logits, width, 3)
    finally:
        native.has_wgmma = has_wgmma


def kept(call: Callable[..., Any], width: int, rows: int) -> None:
    k, p = integers(width, rows), torch.rand(rows, device=DEVICE)
    call(random(rows, width) * 3, k, p, torch.rand(rows, device=DEVICE) * 0.1)
    call(random(rows, width).round(), k * 0, p * 0 + 1, p * 0)


def body() -> None:
    """Norms, activation, embedding, rotation, cache writes."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for dtype in DTYPES:
        x, weight = random(5, 264, dtype=dtype), random(264, dtype=dtype)
        table["rms_norm"](x, weight, EPS)
        table["rms_norm"](random(3, 4, 264, dtype=dtype)[:, 1:], weight, EPS)
        table["add_rms_norm"](x, random(5, 264, dtype=dtype), weight, EPS)
        table["concat_rms_norm"](x, weight, random(5, 264, dtype=dtype), weight, EPS)
        table["silu_and_mul"](x)
        table["embedding"](integers(31, 7), random(31, 1100, dtype=dtype))
        qkv = random(5, 9 * 40, dtype=dtype).view(5, 9, 40)
        q, k = qkv[:, :5], qkv[:, 5:7]
        for first in (False, True):
            table["gated_norm"](qkv[:, :4], qkv[:, 5:], random(40, dtype=dtype), EPS, first)
        table["add_gated"](None, qkv[:, 1:], random(5, 320, dtype=dtype))
        table["add_gated"](x, qkv[:, :1, :1], random(5, 264, dtype=dtype))
        table["regroup"](x, 4, (32, 16, 8, 10))
        table["qk_norm"](q, k, random(40, dtype=dtype), random(40, dtype=dtype), EPS)
        for interleaved in (False, True):
            table["rotary_embedding"](q, k, integers(50, 5), random(50, 24), interleaved)
        cache = (random(6, 5, 2, 40, dtype=dtype), random(6, 5, 2, 40, dtype=dtype))
        slots = torch.tensor([29, -1, 0, 7, 12], device=DEVICE)
        table["kv_write"]((k.contiguous(), k.contiguous()), cache, slots)
        table["greedy_linear"](x, random(300, 264, dtype=dtype), None)
        matmul.matmul(x, random(100, 264, dtype=dtype), random(100, dtype=dtype))
        for rows in (5, 17, 200):
            table["linear_float32"](random(rows, 264, dtype=dtype), random(65, 264))


def steps() -> None:
    """Around a decode step: state of sequences, drafts."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for rows, width in ((1, 1), (5, 3), (300, 2)):
        last = 310
        slots = torch.cat((integers(last, rows - 1), torch.tensor([last], device=DEVICE)))
        tables, computed = integers(40, last + 1, 11, dtype=torch.int32), integers(20, last + 1)
        newest, drafts = integers(99, last + 1), integers(99, last + 1, 2)
        outputs = [integers(9, rows * width) for _ in range(3)]
        lengths = integers(9, rows, dtype=torch.int32)
        blocks = integers(9, rows, 11, dtype=torch.int32)
        num_drafts, room = integers(width, last + 1), integers(40, last + 1)
        turn = integers(9, 1)
        table["prepare_decode"](
            *(slots, tables, computed, newest, drafts, num_drafts, room, 4, turn),
            *(*outputs, lengths, blocks),
        )
        sampled, results = integers(99, rows * width), integers(9, rows, width)
        held = (drafts, num_drafts, computed, newest, results)
        for peaks, post in ((None, None), (random(rows * width), (integers(9, 4, rows, 5), turn))):
            table["finish_decode"](slots, sampled, sampled, peaks, *held, post)
        table["mark_broken"](sampled, random(rows * width), None)
        table["mark_broken"](sampled, random(rows * width), random(rows * width))


def sampling() -> None:
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for rows, width in ((1, 50), (3, 9001)):
        logits, some = random(rows, width) * 3, torch.rand(rows, device=DEVICE)
        table["greedy"](logits)
        table["sample"](logits, integers(1 << 60, rows), integers(999, rows))
        table["log_softmax"](logits)
        counts, seen = integers(3, rows, width, dtype=torch.int32), random(rows, width) > 0
        table["apply_penalties"](logits.clone(), some, some, some + 1, counts, seen)
        words = integers(1 << 31, rows, -(-width // 32), dtype=torch.int32)
        table["apply_bitmask"](logits.clone(), words)


def experts() -> None:
    """Routing, ordering and products of mixtures: few tokens, more than one block, many."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for dtype in DTYPES:
        gate_up, down = random(8, 208, 136, dtype=dtype), random(8, 136, 104, dtype=dtype)
        for tokens in (1, 2, 3, 37, 700):
            for spec in (
                RoutingSpec(8, 3, "softmax", True),
                RoutingSpec(
                    8, 2, "sigmoid", True, num_groups=4, top_k_groups=2, scaling_factor=2.5
                ),
            ):
                logits, bias = random(tokens, 8), random(8)
                table["moe_routing_widened"](logits.to(dtype), None, spec)
                ids, weights = table["moe_routing"](logits, bias, spec)
                table["moe_experts"](random(tokens, 136, dtype=dtype), ids, weights, gate_up, down)


def many_rows() -> None:
    """Experts of prompts, and a dense block of them, with rows after the last tile."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for dtype in DTYPES[:2]:
        gate_up, down = random(4, 256, 256, dtype=dtype), random(4, 256, 128, dtype=dtype)
        logits = random(300, 4)
        ids, weights = table["moe_routing"](logits, None, RoutingSpec(4, 2))
        table["moe_experts"](random(300, 256, dtype=dtype), ids, weights, gate_up, down)
        table["gated_linear"](
            random(1030, 264, dtype=dtype), None, 0.0, random(128, 264, dtype=dtype), None
        )
    routing.order_by_expert(integers(9, 1801, 5) - 1, 8, 128)


def drafting() -> None:
    """Keeping drafts, histories and what is found in them."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    slots = torch.tensor([2, 0, 3, 4], device=DEVICE)  # 4 is the padding slot
    results, drafts = integers(9, 4, 3), integers(9, 5, 2)
    num_drafts, computed, limit = integers(3, 5), integers(9, 5), integers(20, 5)
    for told, post in ((results, None), (results[:, :0], (integers(9, 4, 4, 2), integers(9, 1)))):
        rest = (integers(99, 4, 2), told, limit, 99, computed, limit, drafts, num_drafts, post)
        table["keep_drafts"](slots, *rest)
    table["place_tokens"](slots, limit[slots] + 1, integers(9, 4, 3, dtype=torch.int32), 16)
    history = integers(3, 5, 1100, dtype=torch.int32)
    table["append_history"](slots, results, computed + 20, history)
    table["match_ngrams"](history, slots, torch.tensor([1090, 1, 40, 0], device=DEVICE), 1, 4, 3)


def attention() -> None:
    """Decode in CUDA C++ and in Triton, prompts and mixed steps, latent attention."""
    device = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    decodes = [(1, n) for n in (1, 40, 700, 0)]
    cases: list[tuple[Any, ...]] = [
        (gqa("bfloat16", 16, 2, 128), decodes, 1, 128, 64),
        (gqa("bfloat16", 16, 8, 128), decodes, 1, 128, 64, True),
        (gqa("bfloat16", 16, 8, 128), MIXED, 0, 128, 16, True),
        (gqa("float32", 6, 2, 40), decodes, 1, 24, 5, True),
        (gqa("float16", 10, 2, 128, interleaved=True), [(2, n) for n in (2, 129)], 2, 128, 16),
        (gqa("bfloat16", 4, 4, 64), [(1, n) for n in (1, 40, 700)], 1, 32, 64),
        (gqa("float32", 6, 2, 40), [(1, n) for n in (1, 77)], 1, 24, 5),
        (gqa("bfloat16", 16, 2, 128), MIXED, 0, 128, 16),
        (gqa("float32", 6, 2, 40), MIXED, 0, 24, 5),
        (gqa("float16", 4, 2, 64, interleaved=True), MIXED, 0, 64, 16),
        (replace(gqa("bfloat16", 8, 2, 64), sinks=True), MIXED, 0, 64, 16),
        (gqa("bfloat16", 4, 2, 32), MIXED, 0, 32, 16),
        (mla("bfloat16", 5, 64, 16), [(1, n) for n in (1, 60, 330, 0)], 1, 0, 16),
        (mla("float32"), MIXED, 0, 0, 16),
    ]
    for spec, rows, same, rotary, size, *norms in cases:
        driver = LatentAttention if spec.kind == "mla" else PagedAttention
        step = Step(device, spec, rows, size, rotary, has_norms=bool(norms))
        built = driver(spec, size, device, None)
        step.run(built, step.batch(tokens_per_row=same))
        if rows is MIXED and driver is PagedAttention:  # as such steps are captured
            step.run(built, step.batch(is_exact=False))
        if size == 5:
            built._invariant = True  # as FD_BATCH_INVARIANT sets it
            step.run(built, step.batch(tokens_per_row=same))


def adapters() -> None:
    """Products with what adapters add: in one launch, in two and in three."""
    table = build_kernel_table("cuda", {"tensor_library": "torch"})
    for dtype in DTYPES:
        for rows, width, depth in ((5, 192, 256), (64, 448, 512), (300, 64, 64), (1024, 256, 64)):
            x, norm = random(rows, depth, dtype=dtype), random(depth, dtype=dtype)
            weight = random(width, depth, dtype=dtype)
            a, b = random(3, 16, depth, dtype=dtype), random(3, width, 8, dtype=dtype)
            slots = integers(4, rows, dtype=torch.int32) - 1
            more = (a, b, (width // 2, width), slots)
            product = table["adapted_product"]
            product("plain", x, norm, EPS, weight, None, None, *more)
            product("gated", x, norm, EPS, weight, None, None, *more)
            product("add", x, None, EPS, weight, None, random(rows, width, dtype=dtype), *more)
            before, total = a[:, :8].contiguous(), random(rows, width, dtype=dtype)
            y = table["deferring_add"](x, weight, None, total, before, b)
            if y is not None:
                norm, weight = random(width, dtype=dtype), random(depth, width, dtype=dtype)
                a, after = random(3, 16, width, dtype=dtype), random(3, depth, 8, dtype=dtype)
                more, deferred = (a, after, (depth // 2, depth), more[3]), (x, before, b)
                table["deferred_product"]("plain", y, deferred, norm, EPS, weight, None, *more)
                table["deferred_norm"](y, deferred, norm, EPS, more[3])


def states() -> None:
    """Layers that keep a state: decodes, prompts, and padding rows."""
    for case in cases(DEVICE):
        case()


class Streamed(Sizes):
    """Attention of full batches, for few rows."""

    def native(self, *args: Any) -> StreamShape:
        return StreamShape(32, 4, 1, 3, 2, 9)


def streams() -> None:
    device = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    rows = [0, 130, 3, 700, 64]
    for spec, same in ((gqa("bfloat16", 16, 2, 128), 1), (gqa("float16", 10, 2, 128), 3)):
        step = Step(device, spec, [(same, n) for n in rows], 16, 128, has_norms=same > 1)
        driver = PagedAttention(spec, 16, device, None)
        driver.use(Streamed(driver.sizes.gpu))
        step.run(driver, step.batch(tokens_per_row=same))


def packed_products(name: str) -> None:
    """A format's dense product and experts, with numbers of rows that take each of the kernels."""
    for group in (0, 64) if name in ("wint4", "wint8_zp") else (0,):
        weight = quant_weights.prepare(packed(name, 264, 384, group, 0, DEVICE))
        bias = random(264, dtype=torch.bfloat16)
        for rows in (1, 9, 20, 40, 130, 600):
            x, norm = (random(n, 384, dtype=torch.bfloat16) for n in (rows, 1))
            activated = quant_fused.silu_and_mul(torch.cat((x, x), 1), weight)
            for given in (x, quant_fused.add_rms_norm(x, x, norm[0], EPS, weight)[0], activated):
                quant_linear.linear(given, weight, bias)
    shapes = ((256, 128), (128, 128))
    gate_up, down = (quant_weights.prepare(packed(name, *n, 0, 4, DEVICE)) for n in shapes)
    chosen_experts(quant_experts, 128, gate_up, down)


def packed_tiles() -> None:
    """Kernels of many rows, and of few, in sizes that no small product is given."""
    for name in ("wint4", "wint8", "wfp8", "ccq2"):
        slabs = quant_weights.prepare(packed(name, 264, 1024, 0, 0, DEVICE)).slabs
        tiles = [(64, 128, 2, 4, 8, 4, 2), (128, 192, 1, 4, 4, 2, 1), (256, 128, 2, 4, 4, 2, 1)]
        for own in tiles:
            quant_native.product(Tile(*own), random(300, 1024, dtype=torch.float16), slabs, None)
        if name != "ccq2":
            few = random(11, 1024, dtype=torch.float16)
            quant_native.product(Few(2, 2, 4, 3, 2), few, slabs, None)
            # More tiles than blocks, then blocks that divide K.
            for rows, tile, split in ((300, 208, 1), (3000, 64, 1), (300, 128, 4), (300, 256, 2)):
                x = random(rows, 1024, dtype=torch.float16)
                shape = persistent(tile, slabs.kind, 2, split)
                persistent_product(shape, x, None, slabs, None, torch.float16)
    slabs = quant_weights.prepare(packed("block_fp8", 264, 1024, 0, 0, DEVICE)).slabs
    wide = blocks(256)
    for rows, own in ((300, blocks()), (300, wide), (9000, wide), (300, blocks(split=4))):
        seen = fp8_blocks(random(rows, 1024, dtype=torch.bfloat16))
        quant_blocks.product(own, *seen, slabs, None, torch.bfloat16)
    weight = quant_trellis.prepare(packed("tet2", 320, 1024, 0, 0, DEVICE))
    for tile in (
        Tile(128, 192, 2, 4, 4, 4, 2),
        Tile(256, 128, 1, 4, 4, 2, 2),
        Tile(64, 128, 2, 4, 4, 2, 1, 2),
    ):
        quant_trellis.product(tile, random(300, 1024, dtype=torch.bfloat16), weight, None)


def chosen_experts(room: Any, hidden: int, gate_up: Any, down: Any) -> None:
    for tokens in (1, 5, 60, 90, 130, 300):
        ids, shares = integers(4, tokens, 2), torch.rand(tokens, 2, device=DEVICE)
        x = random(tokens, hidden, dtype=torch.bfloat16)
        room.moe_experts(x, ids, shares, gate_up, down)


def clamped() -> None:
    """Experts of gpt-oss in MXFP4: of one token, of few rows each, of more."""
    weights = [quant_any.prepare(own) for own in matrices((4, 96, 160), True, torch.bfloat16)]
    biases = [random(4, n, dtype=torch.bfloat16) for n in (320, 96)]
    for tokens in (1, 5, 90, 300):
        ids, shares = integers(4, tokens, 2), torch.rand(tokens, 2, device=DEVICE)
        x, own = random(tokens, 96, dtype=torch.bfloat16), zip(weights, biases, strict=True)
        (gate_up, up_bias), (down, down_bias) = own
        quant_any.moe_experts_clamped(x, ids, shares, gate_up, up_bias, down, down_bias, 1.702, 7.0)


def trellis() -> None:
    weight = quant_trellis.prepare(packed("tet2", 192, 384, 0, 0, DEVICE))
    for rows in (1, 9, 20, 40, 130):
        x = random(rows, 384, dtype=torch.bfloat16)
        quant_trellis.linear(x, weight, random(192, dtype=torch.bfloat16))
    own = Gemv(16, 4, 1, split=2, rotates=True)
    quant_trellis.by_shape(own, random(1, 384, dtype=torch.bfloat16), weight, None)
    gate_up, down = (
        quant_trellis.prepare(packed("tet2", *shape, 0, 4, DEVICE))
        for shape in ((256, 128), (128, 128))
    )
    chosen_experts(quant_trellis, 128, gate_up, down)


def moved_blocks() -> None:
    """Blocks of pools of unlike sizes, to one piece of memory and back, and sums of its blocks."""
    for width, word in ((40, 8), (37, 1)):
        pools = [torch.zeros((6, 3, n), dtype=torch.uint8, device="cuda") for n in (width, 3000)]
        sizes = [pool[0].numel() for pool in pools]
        stride = 16 * (sum(sizes) // 16 + 2)
        rows = [[pool.data_ptr(), at * 16 * (sizes[0] // 16 + 1), size]
                for at, (pool, size) in enumerate(zip(pools, sizes, strict=True))]  # fmt: skip
        other = torch.zeros(4 * stride, dtype=torch.uint8, device="cuda")
        parts = torch.tensor(rows, device="cuda")
        blocks, places = torch.tensor([5, 0], device="cuda"), torch.tensor([3, 1], device="cuda")
        where = parts, max(sizes), other.data_ptr(), stride, blocks, places
        for is_out in (True, False):
            move_blocks(*where, word=word, is_out=is_out)
        sum_blocks(other.view(4, -1).view(torch.int32 if word == 8 else torch.uint8), places)


def quantized_caches() -> None:
    """Written, and read by decodes in CUDA C++ and in Triton and by prompts."""
    device = lookup("device", DEVICE)(DeviceOptions(tensor_library="torch", num_threads=1))
    for name, kind in KV_FORMATS.items():
        decodes = [(1, n) for n in (1, 40, 700, 0)]
        for rows, same in ((decodes, 1), ([(3, 9), (3, 200)], 3), (MIXED, 0)):
            spec = replace(gqa("bfloat16", 10, 2, 128), kv_format=name)
            step = Step(device, spec, rows, block_size=16)
            driver = QuantizedAttention(spec, 16, device, None)
            shapes = driver.cache_shapes(len(step.old_k) // 16)
            dtypes = [getattr(torch, kind.dtype)] * 2 + [torch.float16] * 2
            cache = tuple(
                torch.zeros(shape, device=DEVICE).to(dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
            q, k, v = (x.to(DEVICE) for x in (step.q, step.k, step.v))
            batch = step.batch(tokens_per_row=same)
            getattr(quant_cache, kind.write)((k, v), cache, batch.slot_mapping, None)
            driver.forward(q, k, v, cache, driver.prepare(batch))
            if rows is MIXED:  # as such steps are captured
                driver.forward(q, k, v, cache, driver.prepare(step.batch(is_exact=False)))


def one_shot() -> None:
    """Sums over ranks, which take turns here; their blocks' last tiles end anywhere."""
    for world_size in (2, 3):
        for dtype in DTYPES:
            ranks = RanksInTurn(world_size, DEVICE)
            for size in (1, 2049, 100_003):
                ranks.all_reduce([random(size, dtype=dtype) for _ in range(world_size)])


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        native_products, adapters, native_filter, triton_filter, body, steps, sampling, experts,
        many_rows, drafting, attention, states, streams, packed_tiles, clamped, trellis,
        quantized_caches, moved_blocks, one_shot,
    )
} | {name: functools.partial(packed_products, name) for name in (*FORMATS, "ccq2")}  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    counts = count_launches()
    names = sys.argv[1:]
    if "--plain-copies" in names:
        names.remove("--plain-copies")
        copy_plainly()
    for name in names or PARTS:
        began = time.perf_counter()
        with torch.inference_mode():
            PARTS[name]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    print(f"launched: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")
    if DEVICE == "cuda":
        files = {key[1] for key in native._functions}
        print(f"CUDA C++: {', '.join(sorted(files))}")
        print(f"never launched: {', '.join(never_launched(counts)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
