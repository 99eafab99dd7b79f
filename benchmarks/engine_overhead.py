"""What the engine costs the host per step: everything but the model, on a device that does nothing.

    python benchmarks/engine_overhead.py                    # batches of 1, 8, 64 and 256
    python benchmarks/engine_overhead.py --batch 64 --rounds 9 --block-size 64

`core` steps an engine core in this process. `process` is an engine process as `fastdeploy serve`
starts it, with its threads and sockets, whose client only decodes: wall time and processor time per
step. All sequences run from the first step to the last and decode one token in each; figures are
medians over rounds. The device answers at once, so wall time is the time that a real device would
have to hide.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from figures import add_json_option, print_figures

from fastdeploy_core.config import BatchConfig, CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.supervisor import Listener, Supervisor
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import Request, SamplingParams, TokenDeltas
from fastdeploy_core.types.engine import EngineInfo
from fastdeploy_testing.fakes import null_hf_config

PROMPT = 32
WARM_STEPS = 30
TICKS = os.sysconf("SC_CLK_TCK")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--no-overlap", action="store_true")
    add_json_option(parser)
    return parser.parse_args()


def make_config(options: argparse.Namespace) -> EngineConfig:
    """An engine of the fake device that fits the largest batch."""
    length = PROMPT + options.steps + 2 * WARM_STEPS
    largest = max(options.batch)
    blocks = largest * (-(-length // options.block_size) + 1)
    null = null_hf_config(vocab_size=50_000, num_blocks=blocks, predictable=False)
    return EngineConfig(
        model=ModelConfig(
            path=Path("null"), tokenizer_path=Path("null"), max_model_len=length, hf_config=null
        ),
        cache=CacheConfig(block_size=options.block_size),
        batch=BatchConfig(
            max_num_seqs=largest,
            max_num_batched_tokens=largest * PROMPT,
            overlap=not options.no_overlap,
        ),
        device=DeviceConfig(device="null"),
    )


def requests(batch: int, steps: int, tag: str) -> list[Request]:
    """Prompts without a common prefix; answers exactly as long as the round."""
    return [
        Request(
            request_id=f"{tag}-{number:032x}",
            prompt_token_ids=[(7 * number + i) % 40_000 + 10 for i in range(PROMPT)],
            sampling=SamplingParams(
                temperature=0.0, max_tokens=steps + 2 * WARM_STEPS, ignore_eos=True
            ),
            eos_token_ids=[2],
        )
        for number in range(batch)
    ]


def core_round(engine: LocalEngine, batch: int, steps: int, tag: str) -> float:
    """Milliseconds per step of an engine in this process."""
    for request in requests(batch, steps, tag):
        engine.add(request)
    for _ in range(WARM_STEPS):
        engine.step()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    elapsed = time.perf_counter() - started
    while engine.has_work():
        engine.step()
    return elapsed / steps * 1000


class Client(Listener):
    """Receives an engine process's output, counts tokens and reads clocks; does nothing else."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.done = threading.Event()
        self.error: FastDeployError | None = None
        self.pid = 0
        self._left = 0
        self._marks: list[int] = []
        self._seen: list[tuple[float, float]] = []

    def expect(self, marks: list[int], total: int) -> None:
        """Read the clocks when each of `marks` tokens has arrived; the round ends after `total`."""
        self._left, self._marks, self._seen = total, [total - mark for mark in marks], []
        self.done.clear()

    def between(self) -> tuple[float, float]:
        """Wall and processor time from the first mark to the last."""
        (wall, used), (wall_then, used_then) = self._seen[0], self._seen[-1]
        return wall_then - wall, used_then - used

    def on_ready(self, info: EngineInfo) -> None:
        """The engine runs."""
        self.ready.set()

    def on_message(self, message: Any) -> None:
        """Output."""
        for output in message.deltas:
            if isinstance(output, TokenDeltas):
                self._left -= len(output.token_ids)
            else:
                self._left -= sum(len(seq.token_ids) for seq in output.sequences)
        while self._marks and self._left <= self._marks[0]:
            self._marks.pop(0)
            self._seen.append((time.perf_counter(), self.processor_s()))
        if not self._left:
            self.done.set()

    def on_dead(self, error: FastDeployError) -> None:
        """The engine has ended."""
        self.error = error
        self.ready.set()
        self.done.set()

    def processor_s(self) -> float:
        """User and system time of all threads of the process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


class EngineInProcess:
    """An engine process and its client."""

    def __init__(self, config: EngineConfig) -> None:
        self.client = Client()
        resolved: Future[ResolvedPlugins] = Future()
        resolved.set_result(resolve(config))
        self.supervisor = Supervisor(config, resolved, self.client)
        self.supervisor.start()
        self.client.ready.wait()
        if self.client.error is not None:
            raise self.client.error
        life = self.supervisor._life
        assert life is not None, "it is ready"
        self.client.pid = life.process.pid

    def round(self, batch: int, steps: int, tag: str) -> tuple[float, float]:
        """Milliseconds of wall and of processor time per step."""
        self.client.expect(
            [WARM_STEPS * batch, (WARM_STEPS + steps) * batch], (steps + 2 * WARM_STEPS) * batch
        )
        for request in requests(batch, steps, tag):
            self.supervisor.send(wire.Put(request))
        self.client.done.wait()
        if self.client.error is not None:
            raise self.client.error
        wall, used = self.client.between()
        return wall / steps * 1000, used / steps * 1000


def main() -> None:
    """Run and print the table."""
    options = parse_arguments()
    config = make_config(options)
    columns: dict[int, dict[str, list[float]]] = {
        batch: {"core": [], "process": [], "processor": []} for batch in options.batch
    }
    engine = LocalEngine(config, resolve(config))
    for number in range(options.rounds):
        for batch in options.batch:
            columns[batch]["core"].append(core_round(engine, batch, options.steps, f"c{number}"))
    engine.close()
    # Longer rounds for a process: its processor time has a resolution of a hundredth of a second.
    options.steps *= 5
    config = replace(make_config(options), device=DeviceConfig(device="null"))
    remote = EngineInProcess(config)
    for number in range(options.rounds):
        for batch in options.batch:
            wall, used = remote.round(batch, options.steps, f"p{number}-{batch}")
            columns[batch]["process"].append(wall)
            columns[batch]["processor"].append(used)
    remote.supervisor.stop()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}; {options.rounds} rounds, "
        "blocks of "
        f"{options.block_size}, overlap {'off' if options.no_overlap else 'on'}; ms per step, "
        "median (min to max)\n"
    )
    print(f"{'batch':>5} {'core, wall':>24} {'process, wall':>24} {'process, processor':>24}")
    for batch, measured in columns.items():
        cells = [
            f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in measured.values()
        ]
        print(f"{batch:>5} " + " ".join(f"{cell:>24}" for cell in cells))
    names = {"core": "core, wall", "process": "process, wall", "processor": "process, processor"}
    print_figures(
        options,
        {
            f"batch {batch}: {names[column]}, ms": values
            for batch, measured in columns.items()
            for column, values in measured.items()
        },
    )


if __name__ == "__main__":
    main()
