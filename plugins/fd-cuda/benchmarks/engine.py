"""Whole-engine decode and prefill on one GPU, beside floors and vLLM's figures.

    python plugins/fd-cuda/benchmarks/engine.py              # three models, batches 1 8 64 256
    python plugins/fd-cuda/benchmarks/engine.py ernie-0.3b --batch 1 64 --profile

Random bfloat16 weights and prompts of random tokens, all requests at once, greedy, prefix cache
off. prefill: tokens over the time until each request has one token. decode: (time of 128 tokens -
time of one) / 127. step: the median step while all requests decode. host: scheduling, launching and
updating, per such step; the device is waited for otherwise. idle: 1 - busy / step, busy being the
time in which kernels run in a profile of such steps; one that starts early and waits counts only
from the end of the one before. floor: bytes over 4.30 TB/s for decode, operations over 790 TFLOP/s
for prefill. vLLM is 0.25.1 on the same kind of card (one NVIDIA H200, CUDA graphs and
torch.compile, the same workload).
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.loading import weights
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from random_model import SHAPES

PROFILED = 24
NAMES_SHOWN, KERNELS_SHOWN = 72, 24


@dataclass(frozen=True)
class Peer:
    """What a model of that shape cannot be faster than, and what vLLM measured."""

    floor_ms: dict[int, float] = field(default_factory=dict)
    vllm_ms: dict[int, float] = field(default_factory=dict)
    floor_prefill: float = 0.0  # tokens/s
    vllm_prefill: dict[int, float] = field(default_factory=dict)


MODELS = {
    "ernie-0.3b": Peer(
        {1: 0.17, 8: 0.20, 64: 0.45, 256: 1.29},
        {1: 2.23, 8: 1.81, 64: 2.65, 256: 5.56},
        1.35e6,
        {1: 91e3, 8: 505e3, 64: 609e3, 256: 705e3},
    ),
    "qwen3-0.6b": Peer(
        {1: 0.30, 8: 0.50, 64: 2.02, 256: 7.27},
        {1: 2.22, 64: 3.87, 256: 10.4},
        0.79e6,
        {1: 45e3, 64: 404e3, 256: 418e3},
    ),
    "ernie-21b-a3b": Peer(
        {1: 1.58, 8: 5.95, 64: 11.0, 256: 13.6},
        {1: 3.18, 8: 7.88, 64: 13.4, 256: 19.1},
        125e3,
        {1: 24e3, 8: 60e3, 64: 68e3, 256: 68e3},
    ),
    "qwen3-30b-a3b": Peer({1: 1.44, 8: 6.20, 64: 15.3, 256: 20.1}, floor_prefill=135e3),
}


def noise_on_the_device(seed: int) -> None:
    """Weights as --load-format dummy makes them, but drawn by the GPU: the host needs minutes for
    21B."""
    made = weights.DummyTensor.read
    generator = torch.Generator("cuda").manual_seed(seed)

    def read(self: weights.DummyTensor, *region: Any) -> torch.Tensor:
        if self._placement.fill != "normal":
            return made(self, *region)
        whole = torch.empty(self.shape, dtype=torch.bfloat16, device="meta")
        x = torch.empty(whole[region].shape, dtype=torch.bfloat16, device="cuda")
        return x.normal_(0, 0.02, generator=generator)

    weights.DummyTensor.read = read  # type: ignore[method-assign]


class Bench:
    """One model in one engine."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = name, options
        self._config, self._peer = SHAPES[name], MODELS[name]
        self._number = 0
        self._step_s: dict[int, float] = {}  # by batch, as measured
        length = options.prompt + options.output + 64
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self._config))
            config = build_engine_config(
                {
                    "model": folder,
                    "load_format": "dummy",
                    "device": "cuda",
                    "seed": 0,
                    "max_model_len": length,
                    "max_num_seqs": max(options.batch),
                    "block_size": 64,
                    "max_num_batched_tokens": min(options.tokens, length * max(options.batch)),
                    "enable_prefix_caching": False,
                }
            )
            shapes = read_shapes(config.model.hf_config, 1, config.model.dtype)
            moe = [] if shapes.moe is None else [shapes.moe]
            began = time.perf_counter()
            self._engine = LocalEngine(
                config, resolve(config, attention=[shapes.attention], moe=moe)
            )
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)

    def close(self) -> None:
        self._engine.close()

    def add(self, batch: int, num_tokens: int) -> None:
        """Fresh requests of random tokens."""
        draw, vocab = random.Random(self._number), self._config["vocab_size"]
        for _ in range(batch):
            self._number += 1
            self._engine.add(
                Request(
                    request_id=f"{self._number:032x}",
                    prompt_token_ids=[
                        draw.randrange(10, vocab - 10) for _ in range(self._options.prompt)
                    ],
                    sampling=SamplingParams(
                        max_tokens=num_tokens, ignore_eos=True, **self._options.sampling
                    ),
                    eos_token_ids=[2],
                )
            )

    def run(self, batch: int, num_tokens: int) -> tuple[float, list[float], float]:
        """Seconds in all; seconds of each of the last steps; host seconds of one such step."""
        self.add(batch, num_tokens)
        engine, stamps = self._engine, list[float]()
        began = time.perf_counter()
        # The last steps are those of decoding alone: prompts come first.
        host_from = None
        while engine.has_work():
            engine.step()
            stamps.append(time.perf_counter())
            if len(stamps) == 40:
                host_from = self._host_s()
        steps = [b - a for a, b in itertools.pairwise(stamps)]
        host = 0.0
        if host_from is not None and len(stamps) > 40:
            host = (self._host_s() - host_from) / (len(stamps) - 40)
        return stamps[-1] - began, steps[-(num_tokens * 3 // 4) : -2], host

    def _host_s(self) -> float:
        """Scheduling (which launches, too) and updating so far."""
        stats = self._engine.stats()
        return stats.schedule_s + stats.update_s

    def measure(self, batch: int) -> None:
        """One line."""
        options, peer = self._options, self._peer
        self.run(batch, 8)  # compile what has to be, steps of prompts beside decodes among it
        prefill = [self.run(batch, 1)[0] for _ in range(options.rounds)]
        runs = [self.run(batch, options.output) for _ in range(options.rounds)]
        first, whole = statistics.median(prefill), statistics.median(run[0] for run in runs)
        decode = (whole - first) / (options.output - 1)
        step = statistics.median(s for run in runs for s in run[1])
        self._step_s[batch] = step
        host = statistics.median(run[2] for run in runs)
        rate = batch * options.prompt / first
        print(
            f"{self._name} batch {batch}: prefill {rate / 1e3:.0f}k tokens/s (floor "
            f"{peer.floor_prefill / 1e3:.0f}k, vLLM {peer.vllm_prefill.get(batch, 0) / 1e3:.0f}k), "
            f"{first * 1e3:.1f} ms (min {min(prefill) * 1e3:.1f}); decode {decode * 1e3:.3f} ms "
            "(floor "
            f"{peer.floor_ms.get(batch, 0)}, vLLM {peer.vllm_ms.get(batch, '-')}), step "
            f"{step * 1e3:.3f} ms, host {host * 1e6:.0f} us",
            flush=True,
        )

    def profile(self, batch: int, *, prompts: bool = False) -> None:
        """Idle share and the longest kernels, of decode steps or of prompts."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        self.add(batch, 1 if prompts else self._options.output)
        steps = 0
        if not prompts:
            while self._engine.stats().num_running < batch or self._engine.stats().num_waiting:
                self._engine.step()
            for _ in range(20):
                self._engine.step()
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            while self._engine.has_work() if prompts else steps < PROFILED:
                self._engine.step()
                steps += 1
        while self._engine.has_work():
            self._engine.step()
        what = "prompts" if prompts else "decode"
        step_s = 0.0 if prompts else self._step_s.get(batch, 0.0)
        text = summary(recorded, steps, step_s)
        print(f"{self._name} batch {batch} {what}, {steps} steps: {text}", flush=True)


def summary(recorded: Any, steps: int, step_s: float) -> str:
    """Idle share of the device in a step of `step_s` seconds (0: in the profile itself), and
    kernels by the time that passes from the end of the one before (or their own start, if that is
    later) to their end: kernels that start early and wait overlap."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name[:NAMES_SHOWN])
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return "nothing was recorded"
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    busy, end = 0.0, spans[0][0]
    for start, stop, name in spans:
        own = max(0.0, stop - max(start, end))
        by_name[name][0] += 1
        by_name[name][1] += own
        busy, end = busy + own, max(end, stop)
    whole = end - spans[0][0]
    step_us = step_s * 1e6 or whole / steps
    idle = 1 - busy / steps / step_us
    lines = [f"busy {busy / steps:.0f} of {step_us:.0f} us, idle {100 * idle:.1f} %"]
    for name, (count, us) in sorted(by_name.items(), key=lambda item: -item[1][1])[:KERNELS_SHOWN]:
        lines.append(f"  {us / steps:9.1f} us {count / steps:7.1f} x {name}")
    return "\n".join(lines)


def main() -> int:
    """Measure the models asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="idle share and kernels as well")
    parser.add_argument(
        "--sampling", type=json.loads, default={"temperature": 0.0}, help="SamplingParams as JSON"
    )
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; possible: {', '.join(MODELS)}")
    noise_on_the_device(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.rounds} runs, "
          f"{options.prompt} tokens in, {options.output} out, medians")  # fmt: skip
    for model in options.models or [name for name in MODELS if name != "qwen3-30b-a3b"]:
        bench = Bench(model, options)
        for batch in options.batch:
            bench.measure(batch)
            if options.profile:
                bench.profile(batch)
        if options.profile:
            bench.profile(max(options.batch), prompts=True)
        bench.close()
        del bench
        gc.collect()  # an engine's parts know each other
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
