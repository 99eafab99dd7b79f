"""Layers that keep a state on this GPU: microseconds per layer, beside the bytes they cannot beat.

    python plugins/fd-cuda/benchmarks/states.py [--layer "Kimi Linear"] [--json FILE]

Convolution and recurrence of one layer, without the products around them. Decode: one CUDA graph
over many layers' states, more than the L2 holds. Prompts: begun anew, operation by operation, the
host's part included. plain: driver `plain` of fd-models on the same GPU. Medians of several
replays; bfloat16, states float32, random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import replay_us
from fastdeploy_core.contracts.attention import (
    AttentionBatch,
    StateQuestion,
    StateSpec,
    StateWeights,
    cache_dtypes,
)
from fastdeploy_core.contracts.device import DeviceOptions
from fd_models.recurrent.states import PlainStates

from fd_cuda.attention.question import why_not_state
from fd_cuda.device import CudaDevice
from fd_cuda.states.driver import CudaStates

COPY_BYTES_S = 4.30e12  # measured on one H200
SPECS = {
    "Qwen3-Next": StateSpec("delta", 32, 16, 128, 128, (2048, 2048, 4096), 4, "bfloat16"),
    "Granite 4 small": StateSpec("space", 128, 1, 128, 64, (8192, 128, 128), 4, "bfloat16"),
    "Kimi Linear": StateSpec("channel_delta", 32, 32, 128, 128, (4096, 4096, 4096), 4, "bfloat16"),
    "LFM2-1.2B": StateSpec("short_conv", 0, 0, 0, 0, (2048,), 3, "bfloat16"),
}
DECODES = (1, 8, 64, 256)
PROMPTS = {"1 x 1024": [1024], "1 x 16384": [16384], "16 x 1024": [1024] * 16}


class Layer:
    """One layer's shape with a batch; `num_caches` of them share weights and inputs."""

    def __init__(
        self, device: CudaDevice, spec: StateSpec, fed: list[int], start: int, num_caches: int,
        driver: Any = CudaStates,
    ) -> None:  # fmt: skip
        self.device, self.driver = device, driver(spec, 64, device, None)
        self.num_rows, tokens = len(fed), sum(fed)
        channels, heads = sum(spec.conv_parts), max(1, spec.num_heads)

        def normal(*shape: int, kind: Any = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(kind)

        self.x = normal(tokens, channels)
        steps = heads * spec.key_dim if spec.kind == "channel_delta" else heads
        self.dt = normal(tokens, steps) if spec.num_heads else None
        self.beta = normal(tokens, heads) if spec.kind.endswith("delta") else None
        gates = [normal(n, kind=torch.float32) for n in (heads, steps, heads)]
        self.weights = StateWeights(normal(channels, spec.conv_width), None, *gates)
        self.weights.decay = -gates[0].exp()
        shapes = self.driver.cache_shapes(1 + len(fed))
        kinds = [getattr(torch, kind) for kind in cache_dtypes(spec, len(shapes))]
        self.caches = [
            tuple(
                torch.zeros(s, dtype=k, device="cuda") for s, k in zip(shapes, kinds, strict=True)
            )
            for _ in range(num_caches)
        ]
        self.state_bytes = sum(x[0].nbytes for x in self.caches[0]) * len(fed)
        ends = np.array(fed) + start
        tables = np.arange(1, 1 + len(fed))[:, None].repeat(-(-max(ends) // 64), 1)
        self.batch = AttentionBatch.upload(
            device.to_device, np.cumsum([0, *fed]), ends, tables, np.zeros(tokens),
            np.zeros(tokens), 1 if max(fed) == 1 else 0,
        )  # fmt: skip

    def run(self, rounds: int = 1) -> None:
        """Every cache once a round, with one plan for all, as the layers of a model."""
        metadata = self.driver.prepare(self.batch)
        for _ in range(rounds):
            for cache in self.caches:
                self.driver.forward(self.x, self.dt, self.beta, self.weights, cache, metadata)

    def graph_us(self) -> float:
        """Of one layer, in a captured graph."""
        rounds = max(1, 32 // len(self.caches))
        self.run()
        graph = self.device.capture(lambda: self.run(rounds))
        return replay_us(graph.replay) / (rounds * len(self.caches))

    def us(self) -> float:
        """Of one layer, queued by the host."""
        return replay_us(self.run) / len(self.caches)


def decode_table(device: CudaDevice, specs: dict[str, StateSpec]) -> list[dict[str, Any]]:
    found = []
    for (name, spec), rows in itertools.product(specs.items(), DECODES):
        one = Layer(device, spec, [1] * rows, 100, 1)
        caches = max(1, min(64, -(-300_000_000 // one.state_bytes)))
        layer = Layer(device, spec, [1] * rows, 100, caches)
        plain = Layer(device, spec, [1] * rows, 100, 1, PlainStates)
        floor = 2 * layer.state_bytes / COPY_BYTES_S * 1e6
        found.append({"layer": name, "decode": rows, "floor_us": floor, "us": layer.graph_us(),
                      "plain_us": plain.us()})  # fmt: skip
        show(found[-1])
    return found


def prompt_table(device: CudaDevice, specs: dict[str, StateSpec]) -> list[dict[str, Any]]:
    found = []
    served = {
        n: s for n, s in specs.items() if not why_not_state(StateQuestion("cuda", "torch", s))
    }
    for (name, spec), (label, fed) in itertools.product(served.items(), PROMPTS.items()):
        row = {"layer": name, "prompt": label, "us": Layer(device, spec, fed, 0, 4).us()}
        if sum(fed) <= 1024:
            row["plain_us"] = Layer(device, spec, fed, 0, 1, PlainStates).us()
        found.append(row)
        show(row)
    return found


def show(result: dict[str, Any]) -> None:
    print("  ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k,
        v in result.items()),
          flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", choices=SPECS, nargs="+", default=list(SPECS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    device, found = CudaDevice(DeviceOptions()), {}
    with torch.inference_mode():
        specs = {name: SPECS[name] for name in arguments.layer}
        found["decode"], found["prompts"] = decode_table(device, specs), prompt_table(device, specs)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
