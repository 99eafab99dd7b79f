"""Several GPUs of one host: sums, expert parallelism, tensor-parallel engines, and that they equal
one GPU.

    python plugins/fd-cuda/benchmarks/several_gpus.py collectives 4
    python plugins/fd-cuda/benchmarks/several_gpus.py experts 4
    python plugins/fd-cuda/benchmarks/several_gpus.py engine MODEL 4 --batch 1 64 256 \\
        --same reference.json
    python plugins/fd-cuda/benchmarks/several_gpus.py tokens models/ernie-tiny 4

`collectives`: every collective against numpy, then microseconds of a sum within a graph. `experts`:
one mixture layer of 21B-A3B and 30B-A3B shape, whose tokens lie on all GPUs. `engine`: random
weights of a folder (benchmarks/random_model.py makes one), 1024 tokens in, 128 out; with --same the
log-probabilities of first tokens are compared with those that another number of GPUs wrote.
`tokens`: greedy tokens in float32 equal those of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [1 << n for n in range(12, 24)]
TOKENS = (8, 64, 512, 4096)  # of all GPUs together
LAYERS = {
    "ERNIE-4.5-21B-A3B": (64, 6, 2560, 1536),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
}
PROMPT, ANSWER = 1024, 128


def spawn(arguments: list[str], world_size: int, limit_s: float) -> str:
    """Run this file, or a module of the core, as each rank; returns what rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, *(a.format(rank=rank, folder=folder) for a in arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    bad = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    if bad:
        print(f"a rank failed:\n{bad[0][-3000:]}", flush=True)
    return said[0]


def open_group(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    from fastdeploy_core.contracts.device import DeviceOptions

    from fastdeploy_testing.drivers import lookup

    device = lookup("device", "cuda")(DeviceOptions(index=rank, tensor_library="torch"))
    return device, device.communicator(rank, world_size, folder)


def time_us(device: Any, group: Any, call: Callable[[], Any], calls: int, graph: bool) -> float:
    """Median microseconds of a call, all ranks together; within a graph or launched one by one."""
    import torch

    def run() -> None:
        for _ in range(calls):
            call()

    for _ in range(2):
        call()
    replay = device.capture(run).replay if graph else run
    times = []
    for _ in range(5):
        group.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


# -- sums -----------------------------------------------------------------------------------------


def collectives_rank(rank: int, world_size: int, folder: str) -> None:
    import torch

    device, group = open_group(rank, world_size, folder)
    rows = []
    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device.device)
        nccl = time_us(device, group, lambda x=x: group._nccl_sum(x), 10, True)
        own = float("nan")
        if group._one_shot is not None and num_bytes <= 1 << 20:
            own = time_us(device, group, lambda x=x: group._one_shot.all_reduce(x), 10, True)
        rows.append((num_bytes, own, nccl))
    if rank == 0:
        print(f"{world_size} GPUs, sums of up to {group.one_shot_bytes >> 10} KiB take one kernel")
        print(f"{'KiB':>8} {'one kernel, us':>15} {'NCCL, us':>10} {'NCCL, GB/s':>11}")
        for num_bytes, own, nccl in rows:
            print(
                f"{num_bytes >> 10:>8} {own:>15.1f} {nccl:>10.1f} {num_bytes / nccl / 1e3:>11.1f}"
            )
    group.barrier()
    group.close()
    device.close()


# -- experts --------------------------------------------------------------------------------------


def experts_rank(rank: int, world_size: int, folder: str) -> None:
    import torch

    device, group = open_group(rank, world_size, folder)
    for name, (num_experts, top_k, hidden, width) in LAYERS.items():
        layer = _Layer(device, group, num_experts, top_k, hidden, width)
        for tokens in TOKENS:
            row = layer.measure(tokens)
            if rank == 0:
                print(f"{name:>18} {world_size} GPUs {tokens:>5} tokens  {row}", flush=True)
        del layer
        torch.cuda.empty_cache()
    group.barrier()
    group.close()
    device.close()


class _Layer:
    """A mixture layer, whole on every GPU (to compare), and divided by widths and by experts."""

    def __init__(
        self, device: Any, group: Any, num_experts: int, top_k: int, hidden: int, width: int
    ) -> None:
        import torch

        self.device, self.group = device, group
        self.num_experts, self.top_k, self.hidden = num_experts, top_k, hidden
        torch.manual_seed(0)  # the same on all ranks
        at = {"dtype": torch.bfloat16, "device": device.device}
        self.gate_up = torch.randn(num_experts, 2 * width, hidden, **at).mul_(0.02)
        self.down = torch.randn(num_experts, hidden, width, **at).mul_(0.02)
        rank, world = group.rank, group.world_size
        each, share = num_experts // world, width // world
        mine = slice(rank * each, (rank + 1) * each)
        self.own_gate_up, self.own_down = self.gate_up[mine], self.down[mine]
        cut = slice(rank * share, (rank + 1) * share)
        halves = self.gate_up.view(num_experts, 2, width, hidden)[:, :, cut]
        self.thin_gate_up = halves.reshape(num_experts, 2 * share, hidden).contiguous()
        self.thin_down = self.down[:, :, cut].contiguous()

    def measure(self, tokens: int) -> str:
        import torch

        from fd_cuda.kernels.experts import moe_experts, sum_of_experts

        group, world = self.group, self.group.world_size
        torch.manual_seed(tokens)
        at = {"device": self.device.device}
        x = torch.randn(tokens, self.hidden, dtype=torch.bfloat16, **at)
        ids = torch.rand(tokens, self.num_experts, **at).topk(self.top_k).indices
        weights = torch.rand(tokens, self.top_k, **at)
        expected = moe_experts(x, ids, weights, self.gate_up, self.down)
        alone = time_us(
            self.device, group,
            lambda: moe_experts(x, ids, weights, self.gate_up, self.down), 5, True,
        )  # fmt: skip
        found = [f"one GPU {alone:.0f}"]

        def thin() -> Any:
            y = moe_experts(x, ids, weights, self.thin_gate_up, self.thin_down)
            return group.all_reduce(y)

        error = _error(thin(), expected)
        found.append(f"TP {time_us(self.device, group, thin, 5, True):.0f} (off {error:.1e})")

        def held() -> Any:
            local = ids - group.rank * (self.num_experts // world)
            absent = (local < 0) | (local >= self.num_experts // world)
            y = sum_of_experts(
                x, local.masked_fill(absent, -1), weights.masked_fill(absent, 0.0),
                self.own_gate_up, self.own_down, None, 1 / world,
            )  # fmt: skip
            return group.all_reduce(y)

        error = _error(held(), expected)
        found.append(
            f"EP in place {time_us(self.device, group, held, 5, True):.0f} (off {error:.1e})"
        )
        return "us: " + ", ".join(found)


def _error(found: Any, expected: Any) -> float:
    wrong = (found.double() - expected.double()).norm()
    return float(wrong / expected.double().norm())


# -- engines --------------------------------------------------------------------------------------


def engine(options: argparse.Namespace) -> None:
    from fastdeploy_core.api.llm import LLM
    from fastdeploy_core.types import SamplingParams

    began = time.perf_counter()
    llm = LLM(
        options.model, device="cuda", tensor_library="torch", load_format="dummy",
        skip_tokenizer_init=True, tensor_parallel_size=options.world_size, max_model_len=2048,
        max_num_seqs=max(options.batch), max_num_batched_tokens=16384, enable_prefix_caching=False,
        **divided(options.experts),
    )  # fmt: skip
    name = f"{Path(options.model).name}, {options.world_size} GPUs"
    name += f", experts {options.experts}" if options.experts else ""
    print(f"{name}: started in {time.perf_counter() - began:.1f} s", flush=True)
    rng = np.random.default_rng(0)

    def run(batch: int, count: int, **more: Any) -> tuple[float, list[Any]]:
        prompts = [rng.integers(3, 100_000, PROMPT).tolist() for _ in range(batch)]
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, False)
        return time.perf_counter() - start, list(outputs)

    try:
        firsts = [
            {str(t): p.logprob for t, p in o.outputs[0].logprobs[0].items()}
            for o in run(8, 1, logprobs=5)[1]
        ]
        if options.same:
            _compare(Path(options.same), firsts)
        for batch in options.batch:
            run(batch, 4)
            prefill = statistics.median(run(batch, 1)[0] for _ in range(options.runs))
            total = statistics.median(run(batch, ANSWER)[0] for _ in range(options.runs))
            step_ms = (total - prefill) / (ANSWER - 1) * 1e3
            print(
                f"{name}, batch {batch}: decode {step_ms:.2f} ms a step, prefill "
                f"{batch * PROMPT / prefill:.0f} tokens/s, all {batch * ANSWER / total:.0f} "
                "tokens/s",
                flush=True,
            )
    finally:
        llm.close()


def divided(experts: str) -> dict[str, Any]:
    """Engine arguments for whole experts on ranks: "in-place", or a communicator's name."""
    if not experts:
        return {}
    named = "" if experts == "in-place" else experts
    return {"enable_expert_parallel": True, "expert_communicator": named}


def _compare(file: Path, firsts: list[dict[str, float]]) -> None:
    if not file.exists():
        file.write_text(json.dumps(firsts))
        return
    others = json.loads(file.read_text())
    gaps = [
        abs(mine[token] - other[token])
        for mine, other in zip(firsts, others, strict=True)
        for token in mine.keys() & other.keys()
    ]
    same = sum(max(a, key=a.get) == max(b, key=b.get) for a, b in zip(firsts, others, strict=True))
    print(
        f"first tokens: {same} of {len(firsts)} equal, log-probabilities differ by at most "
        f"{max(gaps, default=float('nan')):.3f} ({len(gaps)} compared)",
        flush=True,
    )


def tokens(options: argparse.Namespace) -> None:
    from fastdeploy_testing.generate import sampled_tokens

    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 400, n).tolist() for n in (1, 7, 64, 65, 200, 30)]
    runs = {}
    for size in (1, options.world_size):
        runs[size] = sampled_tokens(
            Path(options.model), prompts, [{}, {"temperature": 0.8, "top_p": 0.9}], max_tokens=32,
            device="cuda", tensor_library="torch", dtype="float32", max_model_len=512,
            tensor_parallel_size=size, **divided(options.experts),
        )["runs"]  # fmt: skip
    for name, one, many in zip(("greedy", "sampled"), *runs.values(), strict=True):
        same = sum(a == b for a, b in zip(one["together"], many["together"], strict=True))
        alone = sum(a == b for a, b in zip(one["together"], many["alone"], strict=True))
        print(
            f"{name} tokens in float32 on {options.world_size} GPUs {options.experts}: {same} of "
            f"{len(prompts)} answers together and {alone} alone equal one GPU's",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("collectives", "experts"):
        kinds.add_parser(kind).add_argument("world_size", type=int)
    for kind in ("engine", "tokens"):
        sub = kinds.add_parser(kind)
        sub.add_argument("model")
        sub.add_argument("world_size", type=int)
        sub.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
        sub.add_argument("--same", default="")
        sub.add_argument("--experts", default="", help="in-place, or an expert communicator's name")
        sub.add_argument("--runs", type=int, default=2)
    rank = kinds.add_parser("rank")
    rank.add_argument("what")
    rank.add_argument("rank", type=int)
    rank.add_argument("world_size", type=int)
    rank.add_argument("folder")
    options = parser.parse_args()
    if options.kind == "rank":
        ranks = {"collectives": collectives_rank, "experts": experts_rank}
        ranks[options.what](options.rank, options.world_size, options.folder)
        sys.stdout.flush()
        os._exit(0)
    if options.kind in ("engine", "tokens"):
        {"engine": engine, "tokens": tokens}[options.kind](options)
        return
    size = options.world_size
    check = ["-m", "fastdeploy_testing.rank", "cuda", "torch", "{rank}", str(size), "{folder}"]
    print(f"{options.kind} against numpy: {spawn(check, size, 60).splitlines()[-1:]}", flush=True)
    print(spawn([__file__, "rank", options.kind, "{rank}", str(size), "{folder}"], size, 60))


if __name__ == "__main__":
    main()
