"""What a decode step costs the host with and without speculation: an engine's whole time except the
device's work.

    python benchmarks/speculative_overhead.py --methods mtp:1,3 ngram_match:5 --batch 1 8 32 128

The engine replays captured graphs that do nothing: the first half of every row's drafts is always
accepted. So only this project's own code is measured, and copies, which a processor does at once.
Figures are microseconds of the engine's thread, medians over rounds; beside each stands its ratio
to the same round without speculation. `off` is an engine that has speculation and has turned it
off. `step`: per decode of sequences that all continue, two of which the engine does in one step.
`answer`: per answer of about ANSWER tokens in a closed loop, prompts and changes of the batch
included.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import add_json_option, print_figures

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.types import Request, SamplingParams, TokenDeltas
from fastdeploy_core.worker import model_runner
from fastdeploy_core.worker import worker as worker_module
from fastdeploy_testing.capturing import CapturingDevice, OnCapturingDevice, RecordableAttention

ROOT = Path(__file__).resolve().parents[1]
PROMPT, WARM_STEPS = 16, 12
LONGEST, ANSWER = 1024, 48


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="*", default=["mtp:1,3", "ngram_match:5"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default=str(ROOT / "models" / "ernie-tiny"))
    parser.add_argument("--tensor-library", default="torch")
    parser.add_argument("--profile", choices=("step", "answer"), help="print where the time goes")
    add_json_option(parser)
    return parser.parse_args()


class QueuingDevice(CapturingDevice):
    """Declares that it only queues work, as an accelerator does, and takes steps as fd-cuda
    does."""

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.limits = replace(self.limits, asynchronous=True, decodes_per_step=2)

    def host_box(self, num_words: int) -> tuple[Any, np.ndarray]:
        """See PostingDevice."""
        host = np.zeros(num_words, dtype=np.int64)
        return self.to_device(host), host


class NoAttention(RecordableAttention):
    """Computes nothing: what a capture computes is thrown away, and takes minutes at batch 128."""

    def forward(self, q: Any, *others: Any, **named: Any) -> Any:
        """See RecordableAttention."""
        shape = (q.shape[0], self.spec.num_heads * self.spec.v_head_dim)
        return self._xp.zeros(shape, dtype=q.dtype, device=self._device.device)


class OnQueuingDevice(OnCapturingDevice):
    """The resolved plugins with these two."""

    def load(self, kind: str, name: str = "") -> Any:
        """The driver class."""
        own = {"device": QueuingDevice, "attention": NoAttention}
        return own[kind] if kind in own else super().load(kind, name)


def make_engine(options: argparse.Namespace, speculative: dict[str, Any] | None) -> LocalEngine:
    """An engine whose captured graphs do nothing any more."""
    largest = max(options.batch)
    config = build_engine_config(
        {
            "model": options.model,
            "device": "cpu",
            "tensor_library": options.tensor_library,
            "dtype": "float32",
            "max_num_seqs": largest,
            "max_model_len": LONGEST,
            "max_num_batched_tokens": max(1024, PROMPT * largest),
            "block_size": 64,
            "num_gpu_blocks_override": (LONGEST // 64 + 2) * largest,
            "enable_prefix_caching": False,
            "graph_capture_sizes": options.batch,
            "num_threads": 1,
            "speculative_config": speculative,
        }
    )
    resolved: Any = OnQueuingDevice(resolve_plugins(config))
    # nothing is sampled, so nothing has to be waited for
    for module in (worker_module, model_runner):
        module.can_capture_sampling = lambda *parts: True  # type: ignore[attr-defined]
    engine = LocalEngine(config, resolved)
    worker = engine._core._executor._worker
    forget_the_model(worker)
    for work in worker.device.recorded:
        work.replay = lambda: None
    postbox = worker._runner.slots.postbox
    for recorded in worker._runner._graphs._decodes.values():
        recorded._forward.replay = partial(post, postbox, recorded.width)
    return engine


def forget_the_model(worker: Any) -> None:
    """Steps with prompts, which a processor does not capture, also compute nothing."""
    model, xp = worker._runner._model, worker.device.xp
    config = worker.config.model.hf_config
    hidden, logits = (
        xp.zeros((4096, config[size]), dtype=xp.float32, device=worker.device.device)
        for size in ("hidden_size", "vocab_size")
    )

    def forward(input_ids: Any, positions: Any, context: Any) -> Any:
        return hidden[: (input_ids if context.rows is None else context.rows).shape[0]]

    model.forward = forward
    model.compute_logits = lambda x: logits[: x.shape[0]]
    speculation = worker._runner._drafting
    if speculation is not None and not speculation.reads_history:
        drafts = xp.zeros((4096, 32), dtype=xp.int64, device=worker.device.device)
        speculation._drafter.propose = lambda batch: drafts[
            : batch.attention.num_seqs, : batch.max_drafts
        ]


def post(postbox: Any, width: int) -> None:
    """The results that each step appears to have: the first half of the tokens, and as many drafts
    as fit."""
    turn = postbox._count
    results, drafts = (
        box[turn % len(box)] for box in (postbox._results_host, postbox._drafts_host)
    )
    right = (width + 1) // 2
    tag = turn * 2**32
    results[:, :right] = drafts[:] = tag + 7
    results[:, right:width] = tag + 2**32 - 1
    results[:, width], results[:, width + 1] = tag + width - 1, tag + right - 1


def turn_off(engine: LocalEngine, sizes: list[int]) -> None:
    """As if the draft policy had found that drafts do not pay."""
    policy = engine._core.scheduler._policy
    for size in sizes:
        policy.choose(size)
        policy._regime._next = 10**9


def serve(
    engine: LocalEngine, batch: int, tag: str, profiler: cProfile.Profile | None = None
) -> float:
    """Microseconds per answer in a closed loop of answers of ANSWER tokens on average."""
    count = max(48, 6 * batch)
    requests = [
        Request(
            request_id=f"{tag}-{number}",
            prompt_token_ids=[(7 * number + i) % 400 + 10 for i in range(PROMPT)],
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=ANSWER // 2 + 7 * number % ANSWER,
                ignore_eos=True,
            ),
            eos_token_ids=[2],
        )
        for number in range(count)
    ]
    waiting, running = iter(requests), 0
    if profiler is not None:
        profiler.enable()
    began = time.thread_time()
    while True:
        while running < batch and (request := next(waiting, None)) is not None:
            engine.add(request)
            running += 1
        if not running:
            break
        for output in engine.step():
            running -= not isinstance(output, TokenDeltas) and output.finished
    seconds = time.thread_time() - began
    if profiler is not None:
        profiler.disable()
    while engine.has_work():
        engine.step()
    return seconds / count * 1e6


def measure(
    engine: LocalEngine, batch: int, steps: int, tag: str, profiler: cProfile.Profile | None = None
) -> float:
    """Microseconds per decode of sequences that all continue."""
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST - PROMPT, ignore_eos=True)
    for number in range(batch):
        prompt = [(7 * number + i) % 400 + 10 for i in range(PROMPT)]
        name = f"{tag}-{number}"
        engine.add(
            Request(request_id=name, prompt_token_ids=prompt, sampling=params, eos_token_ids=[2])
        )
    for _ in range(WARM_STEPS):
        engine.step()
    if profiler is not None:
        profiler.enable()
    scheduler, num_decodes = engine._core.scheduler, list[int]()
    update = scheduler.update

    def count(step: Any, output: Any) -> None:
        num_decodes.append(step.num_decodes)
        update(step, output)

    scheduler.update = count  # type: ignore[method-assign]
    began = time.thread_time()
    for _ in range(steps):
        engine.step()
    if profiler is not None:
        profiler.disable()
    seconds = time.thread_time() - began
    assert engine.has_work(), "the sequences ended within the round"
    scheduler.update = update  # type: ignore[method-assign]
    engine.abort([f"{tag}-{number}" for number in range(batch)])
    while engine.has_work():
        engine.step()
    return seconds / sum(num_decodes) * 1e6


def wanted_engines(options: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Names and speculative sections."""
    wanted: dict[str, dict[str, Any] | None] = {"none": None}
    for named in options.methods:
        method, _, numbers = named.partition(":")
        for k in map(int, numbers.split(",")):
            section = {"method": method, "num_speculative_tokens": k, "adaptive_length": False}
            wanted[f"{method} k={k}"] = section
    wanted["off"] = {"method": "ngram_match", "num_speculative_tokens": 3}
    return wanted


def show_profile(engine: LocalEngine, options: argparse.Namespace, name: str) -> None:
    """Where the time of the largest batch goes."""
    profiler, batch = cProfile.Profile(), options.batch[-1]
    if options.profile == "step":
        measure(engine, batch, options.steps, "profile", profiler)
    else:
        serve(engine, batch, "profile", profiler)
    print(name)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    """Measure, engines in turns, and print."""
    options = parse_arguments()
    wanted = wanted_engines(options)
    engines = {name: make_engine(options, section) for name, section in wanted.items()}
    turn_off(engines["off"], options.batch)
    columns = [f"{what} {batch}" for what in ("step", "answer") for batch in options.batch]
    rows: dict[str, dict[str, list[float]]] = {
        name: {column: [] for column in columns} for name in engines
    }
    for batch in options.batch:
        for number in range(options.rounds):
            for name, engine in engines.items():
                tag = f"{batch}-{number}"
                rows[name][f"step {batch}"].append(measure(engine, batch, options.steps, tag))
                rows[name][f"answer {batch}"].append(serve(engine, batch, f"s{tag}"))
    print(f"{'':16}" + "".join(f"{column:>16}" for column in columns))
    for name, found in rows.items():
        line = f"{name:16}"
        for column in columns:
            pairs = zip(found[column], rows["none"][column], strict=True)
            share = statistics.median(own / plain for own, plain in pairs)
            line += f"{statistics.median(found[column]):9.0f} {share:6.2f}"
        print(line)
    for name, engine in engines.items():
        if options.profile:
            show_profile(engine, options, name)
        engine.close()
    print_figures(
        options,
        {
            f"{name}: {column}, us": values
            for name, found in rows.items()
            for column, values in found.items()
        },
    )


if __name__ == "__main__":
    main()
