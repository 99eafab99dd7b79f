"""Paged attention on this GPU: microseconds per layer, beside the bytes or FLOPs they cannot beat.

    python plugins/fd-cuda/benchmarks/attention.py [--decode-only] [--block-size 64]

Decode: one CUDA graph over many layers' caches, more than the L2 holds, so every key comes from
memory; the plan of splits, made once a step, is timed by itself. Prefill: the rotation and cache
write included, and torch's own kernels beside it where they know such layers. Medians of several
replays; bfloat16, random numbers. FD_CUDA_NATIVE=0: by the Triton kernels alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions

from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.device import CudaDevice

COPY_BYTES_S, MATMUL_FLOPS_S = 4.30e12, 790e12  # measured on one H200


def layer(heads: int, kv_heads: int, width: int = 128, **more: Any) -> AttentionSpec:
    return AttentionSpec("gqa", heads, kv_heads, width, width, width**-0.5, "bfloat16", **more)


LAYERS = {
    "16/2 (ERNIE-0.3B)": layer(16, 2),
    "20/4 (ERNIE-21B)": layer(20, 4),
    "64/8 (ERNIE-300B)": layer(64, 8),
    "16/8 (Qwen3-0.6B)": layer(16, 8),
    "32/8 of 64 (Llama-3.2-1B)": layer(32, 8, 64),
    "64/8 of 64 (gpt-oss)": layer(64, 8, 64, sinks=True),
    "64/8 of 64 (gpt-oss, window)": layer(64, 8, 64, sinks=True, window=128),
}
DECODES = [(1, 1024), (1, 8192), (1, 32768), (8, 1024), (64, 1024), (256, 1024), (32, 8192)]
# FlashAttention 3 of vLLM 0.25.1, 32 splits, block 16, one H200, 2026-11-21.
FA3 = {
    "16/2 (ERNIE-0.3B)": (9.1, 13.2, 20.4, 11.4, 25.1, 81.0, 71.8),
    "20/4 (ERNIE-21B)": (10.3, 14.2, 27.2, 14.4, 43.0, 147, 134),
    "64/8 (ERNIE-300B)": (9.6, 17.5, 41.6, 17.0, 77.7, 280, 252),
}
# (new tokens, tokens in all) of each row
PREFILLS = {
    "1 x 1024": [(1024, 1024)],
    "1 x 8192": [(8192, 8192)],
    "1 x 16384": [(16384, 16384)],
    "8 x 1024": [(1024, 1024)] * 8,
    "16 x 1024": [(1024, 1024)] * 16,
    "64 x 128": [(128, 128)] * 64,
    "1 x 2048 after 6144": [(2048, 8192)],
    "4 x 512 + 64 decodes at 1024": [(512, 1024)] * 4 + [(1, 1024)] * 64,
}
DTYPE = torch.bfloat16


class World:
    """One batch of one layer's shape, over as many caches as are wanted."""

    def __init__(
        self, device: CudaDevice, spec: AttentionSpec, rows: list[tuple[int, int]],
        block_size: int, num_caches: int = 1,
    ) -> None:  # fmt: skip
        self.device, self.spec, self.rows = device, spec, rows
        heads, width = (spec.num_heads, spec.num_kv_heads), spec.head_dim
        self.driver = PagedAttention(self.spec, block_size, device, None)
        self.total = sum(fed for fed, _ in rows)
        columns = (heads[0] + 2 * heads[1]) * width
        qkv = torch.randn(self.total, columns, dtype=DTYPE, device="cuda")
        q, k, v = qkv.split([heads[0] * width, heads[1] * width, heads[1] * width], 1)
        self.q = q.view(self.total, heads[0], width)
        self.k, self.v = (x.view(self.total, heads[1], width) for x in (k, v))
        per_row = [-(-n // block_size) for _, n in rows]
        self.num_blocks = sum(per_row) + 1
        order = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks))
        self.tables = np.zeros((len(rows), max(per_row)), np.int32)
        at = 0
        for row, count in enumerate(per_row):
            self.tables[row, :count] = order[at : at + count]
            at += count
        shapes = self.driver.cache_shapes(self.num_blocks)
        self.caches = [
            tuple(torch.randn(s, dtype=DTYPE, device="cuda") for s in shapes)
            for _ in range(num_caches)
        ]
        self.rotary = torch.randn(max(n for _, n in rows) + 1, width, device="cuda")
        self.more = {"sinks": torch.randn(heads[0], device="cuda")} if spec.sinks else {}
        self.block_size = block_size

    def batch(self) -> AttentionBatch:
        fed = np.array([f for f, _ in self.rows])
        lengths = np.array([n for _, n in self.rows])
        starts = np.cumsum([0, *fed])
        row = np.repeat(np.arange(len(self.rows)), fed)
        position = np.arange(self.total) - starts[row] + (lengths - fed)[row]
        slots = self.tables[row, position // self.block_size].astype(np.int64) * self.block_size
        return AttentionBatch.upload(
            self.device.to_device,
            *(starts, lengths, self.tables, slots + position % self.block_size, position),
            int(fed[0]) if (fed == fed[0]).all() and fed[0] <= 8 else 0,
        )

    def forward(self, cache: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
        own = (self.q, self.k, self.v, cache, metadata, self.rotary)
        return self.driver.forward(*own, **self.more)

    def graph_us(self, metadata: Any, repeats: int = 7, rounds: int = 0) -> float:
        """Median microseconds per layer of one graph over all caches."""
        for cache in self.caches[:2]:
            self.forward(cache, metadata)
        rounds = rounds or max(1, 64 // len(self.caches))

        def run() -> None:
            for _ in range(rounds):
                for cache in self.caches:
                    self.forward(cache, metadata)

        graph = self.device.capture(run)
        return replay_us(graph.replay, repeats) / (rounds * len(self.caches))

    def seen(self, length: int) -> int:
        """Keys that the last of so many tokens sees."""
        return min(length, self.spec.window or length)

    def kv_bytes(self) -> int:
        keys = sum(self.seen(n) for _, n in self.rows)
        return keys * self.spec.num_kv_heads * self.spec.head_dim * 2 * 2

    def flops(self) -> float:
        pairs = sum(self.seen(i + 1) for fed, n in self.rows for i in range(n - fed, n))
        return 4.0 * pairs * self.spec.num_heads * self.spec.head_dim


def replay_us(replay: Any, repeats: int = 7) -> float:
    for _ in range(2):
        replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def num_caches(rows: list[tuple[int, int]], spec: AttentionSpec) -> int:
    """More than the L2 holds, a few GiB at most."""
    size = sum(n for _, n in rows) * spec.num_kv_heads * spec.head_dim * 4
    return max(1, min(256, -(-300_000_000 // size)))


def decode_table(device: CudaDevice, block_size: int) -> None:
    for name, spec in LAYERS.items():
        for index, (batch, length) in enumerate(DECODES):
            rows = [(1, length)] * batch
            world = World(device, spec, rows, block_size, num_caches(rows, spec))
            attention = world.batch()
            time_us = world.graph_us(world.driver.prepare(attention))
            plan = device.capture(lambda w=world, a=attention: w.driver.prepare(a) and None)
            show({
                "heads": name, "batch": f"{batch} x {length}",
                "floor_us": world.kv_bytes() / COPY_BYTES_S * 1e6,
                "fa3_us": FA3[name][index] if name in FA3 else None, "us": time_us,
                "plan_us": replay_us(plan.replay),
            })  # fmt: skip


def torch_prefill_us(world: World, backend: Any) -> float | None:
    """torch's own kernel for equal rows without a prefix, over what it needs: no cache, no
    rotation."""
    (fed, n), batch = world.rows[0], len(world.rows)
    if fed != n or len(set(world.rows)) != 1 or world.spec.needs:
        return None
    from torch.nn.attention import sdpa_kernel

    q, k, v = (
        x.reshape(batch, fed, -1, world.spec.head_dim).transpose(1, 2)
        for x in (world.q, world.k, world.v)
    )
    try:
        with sdpa_kernel(backend):
            call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            call()
            return replay_us(lambda: [call() for _ in range(5)]) / 5
    except RuntimeError:
        return None


def prefill_table(device: CudaDevice, block_size: int) -> None:
    from torch.nn.attention import SDPBackend

    for name, spec in LAYERS.items():
        for label, rows in PREFILLS.items():
            world = World(device, spec, rows, block_size)
            time_us = world.graph_us(world.driver.prepare(world.batch()), rounds=4)
            show({
                "heads": name, "batch": label, "floor_us": world.flops() / MATMUL_FLOPS_S * 1e6,
                "us": time_us, "tflops": world.flops() / time_us / 1e6,
                "cudnn_us": torch_prefill_us(world, SDPBackend.CUDNN_ATTENTION),
                "flash_us": torch_prefill_us(world, SDPBackend.FLASH_ATTENTION),
            })  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print("  ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k,
        v in result.items()),
          flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode-only", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    arguments = parser.parse_args()
    size = arguments.block_size
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, block size {size}", flush=True
    )
    device = CudaDevice(DeviceOptions())
    with torch.inference_mode():
        decode_table(device, size)
        if not arguments.decode_only:
            prefill_table(device, size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
