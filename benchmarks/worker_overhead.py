"""Host time of a captured decode step in the worker: taking the message, launching, reading tokens.

    python benchmarks/worker_overhead.py [--tensor-library torch] [--steps 400] [--runs 5]

The captured work itself is left out (its replay does nothing), so only this project's own code is
measured, and copies, which a processor does at once. Rows are greedy, because other rows run their
sampler on this processor, which would be the device's work. Prints the median of the runs,
microseconds of processor time per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import add_json_option, print_figures

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import BatchRows, NewSequence, SamplingParams, SchedulerOutput
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.capturing import OnCapturingDevice

BLOCK_SIZE, PROMPT, LONGEST = 64, 16, 2048
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def make_worker(folder: Path, library: str, batch: int) -> Worker:
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    config = build_engine_config(
        {
            "model": str(folder),
            "device": "cpu",
            "tensor_library": library,
            "load_format": "dummy",
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(2048, PROMPT * batch),
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 8 * batch + 1,
            "graph_capture_sizes": [batch],
            "num_threads": 1,
        }
    )
    resolved: Any = OnCapturingDevice(resolve(config, layers=read_shapes(MODEL, 1).layers))
    worker = Worker(config, resolved)
    worker.load()
    worker.initialize_cache(8 * batch + 1, 0)
    return worker


def start(worker: Worker, batch: int, params: SamplingParams) -> np.ndarray:
    """Prefill; returns the number of blocks of each row."""
    new = [
        NewSequence(
            seq_id=n,
            token_ids=[3 + (n * 7 + i) % 500 for i in range(PROMPT - n % 16)],
            num_prompt_tokens=PROMPT - n % 16,
            block_ids=[1 + n],
            sampling=params,
            seed=n,
        )
        for n in range(batch)
    ]
    lengths = [len(each.token_ids) for each in new]
    rows = BatchRows.of(list(range(batch)), [0] * batch, lengths)
    worker.launch(SchedulerOutput(step_id=0, new_sequences=new, rows=rows)).wait()
    return np.array(lengths)


def measure(folder: Path, library: str, batch: int, num_steps: int) -> list[float]:
    """Microseconds per step: launch, read; the next step is launched before the previous one is
    read."""
    worker = make_worker(folder, library, batch)
    lengths = start(worker, batch, SamplingParams(temperature=0))
    device: Any = worker.device
    for work in device.recorded:
        work.replay = lambda: None  # the device's work; all that follows is the host's
    num_blocks = np.ones(batch, dtype=np.int64)
    next_block, launch_s, read_s, pending = 1 + batch, 0.0, 0.0, []
    for step in range(num_steps):
        lengths = lengths + 1
        short = np.flatnonzero(lengths > num_blocks * BLOCK_SIZE).tolist()
        blocks = {row: [1 + (next_block + i) % (8 * batch)] for i, row in enumerate(short)}
        next_block += len(short)
        num_blocks[short] += 1
        message = SchedulerOutput(step_id=1 + step, new_block_ids=blocks)
        began = time.thread_time()
        pending.append(worker.launch(message))
        launched = time.thread_time()
        if len(pending) == 2:
            pending.pop(0).wait()
        read_s += time.thread_time() - launched
        launch_s += launched - began
    worker.close()
    return [launch_s / num_steps * 1e6, read_s / num_steps * 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-library", default="torch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    add_json_option(parser)
    asked = parser.parse_args()
    print(
        f"{asked.tensor_library}, {os.cpu_count()} cores, median of {asked.runs} runs of "
        f"{asked.steps} steps"
    )
    print(f"{'rows':>5} {'launch':>8} {'read':>8} {'sum':>8}   microseconds per step")
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for batch in (1, 32, 256):
            runs = [
                measure(Path(folder), asked.tensor_library, batch, asked.steps)
                for _ in range(asked.runs)
            ]
            launch, read = (statistics.median(run[i] for run in runs) for i in range(2))
            print(f"{batch:>5} {launch:>8.1f} {read:>8.1f} {launch + read:>8.1f}")
            figures[f"{batch} rows: launch, us"] = [run[0] for run in runs]
            figures[f"{batch} rows: read, us"] = [run[1] for run in runs]
            figures[f"{batch} rows: sum, us"] = [sum(run) for run in runs]
    print_figures(asked, figures)


if __name__ == "__main__":
    main()
