"""Decode and prefill of a whole engine, through LLM.generate.

    python plugins/fd-cuda/benchmarks/engine.py                 # three models, batches 1 8 64 256
    python plugins/fd-cuda/benchmarks/engine.py ernie-0.3b --batch 1 64 --profile
    python plugins/fd-cuda/benchmarks/engine.py ernie-300b-a47b --quantization wint2 --batch 1 8 32
    python plugins/fd-cuda/benchmarks/engine.py models/ernie-tiny --device cpu --batch 1 --output 16

Random weights (bfloat16, unless a model folder says otherwise) and prompts of random token ids, all
requests at once, greedy, fixed output length, prefix cache off, no tokenizer. Medians of rounds.

prefill  prompt tokens over the seconds that LLM.generate takes for one token of each request
decode   (seconds of --output tokens - seconds of one token) / (--output - 1)
step     one decode of all requests: the median while all of them decode. A call of the engine may
         hold several steps (SchedulerOutput.num_decodes); its time is divided by their number.
         Not with --speculative, whose steps give a sequence one token or more.
host     scheduling, launching and updating, per step; otherwise the host waits for the device
outputs  LLM's own work between calls of the engine, per step
idle     1 - busy / step. Busy is the time in which kernels run in a profile of such steps; a kernel
         that starts early and waits counts only from the end of the one before.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.loading import weights
from fastdeploy_core.types import RequestOutputDelta, SamplingParams, TokenDeltas

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from figures import add_json_option, print_figures
from random_model import SHAPES
from synthetic_acceptance import add_acceptance_option, synthetic_acceptance

UNPROFILED, PROFILED = 20, 24  # steps before a profile, and in it
NAMES_SHOWN, KERNELS_SHOWN = 72, 24


MODELS = ("ernie-0.3b", "qwen3-0.6b", "ernie-21b-a3b")  # measured unless others are named


def noise_on_the_device(seed: int) -> None:
    """Weights are the normal noise of --load-format dummy, but sampled by the GPU, no two alike."""
    made = weights.DummyTensor.read
    generator = torch.Generator("cuda").manual_seed(seed)

    def read(self: weights.DummyTensor, *region: Any) -> torch.Tensor:
        if self._placement.fill != "normal":
            return made(self, *region)
        whole = torch.empty(self.shape, dtype=torch.bfloat16, device="meta")
        x = torch.empty(whole[region].shape, dtype=torch.bfloat16, device="cuda")
        return x.normal_(0, 0.02, generator=generator)

    weights.DummyTensor.read = read  # type: ignore[method-assign]


class Steps:
    """Times of the steps in which all of `batch` requests decode, call by call of the engine.

    host_s: seconds that the engine's host part has taken so far. It is asked twice, because asking
    takes time: at the first of these steps and when half of `num_tokens` steps have passed.
    """

    def __init__(self, batch: int, num_tokens: int, host_s: Callable[[], float]) -> None:
        self.seconds: list[float] = []  # of each step
        self.outputs: list[float] = []  # seconds between calls, by step
        self.host: float | None = None  # seconds per step
        self.num_calls = 0
        self._batch, self._host_s, self._host_steps = batch, host_s, max(1, num_tokens // 2)
        self._host_from, self._steps_before = 0.0, 0
        self._was_full = False
        self._ended = self._left = 0.0

    def add(
        self,
        began: float,
        ended: float,
        outputs: Sequence[RequestOutputDelta | TokenDeltas],
    ) -> None:
        """A call of the engine: when it began and ended, what it returned."""
        rows, tokens = count_tokens(outputs)
        is_full = rows == self._batch and tokens % rows == 0
        if is_full and self._was_full:
            self.num_calls += 1
            num_steps = tokens // rows
            self.seconds += [(ended - self._ended) / num_steps] * num_steps
            self.outputs += [(began - self._left) / num_steps] * num_steps
            num_steps = len(self.seconds) - self._steps_before
            if self.host is None and num_steps >= self._host_steps:
                self.host = (self._host_s() - self._host_from) / num_steps
        elif is_full and self.host is None:
            self._host_from, self._steps_before = self._host_s(), len(self.seconds)
        self._was_full, self._ended = is_full, ended
        self._left = time.perf_counter()


def count_tokens(outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> tuple[int, int]:
    """Requests that got tokens from one call of the engine, and how many tokens."""
    rows = tokens = 0
    for output in outputs:
        if isinstance(output, TokenDeltas):
            rows += len(output.request_ids)
            tokens += len(output.token_ids)
        else:
            rows += 1
            tokens += sum(len(sequence.token_ids) for sequence in output.sequences)
    return rows, tokens


@dataclass(frozen=True)
class Run:
    """One call of LLM.generate."""

    seconds: float
    steps: Steps


class Bench:
    """One model in one engine."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = Path(name).name, options
        self._config = SHAPES.get(name) or json.loads((Path(name) / "config.json").read_text())
        self._number = 0
        self._step_s: dict[int, float] = {}  # by batch, as measured
        self.figures: dict[str, list[float]] = {}
        if options.speculative and options.speculative["method"] == "mtp":
            self._config = {"num_nextn_predict_layers": 1, **self._config}
        if options.layers:
            self._config = {**self._config, "num_hidden_layers": options.layers}
        length = options.prompt + options.output + 64
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self._config))
            began = time.perf_counter()
            self._llm = LLM(
                folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                device=options.device,
                tensor_library="torch",
                seed=0,
                max_model_len=length,
                max_num_seqs=max(options.batch),
                block_size=64,
                max_num_batched_tokens=min(options.tokens, length * max(options.batch)),
                enable_prefix_caching=False,
                speculative_config=options.speculative,
                quantization=options.quantization,
            )
        print(f"{self._name}: ready after {time.perf_counter() - began:.1f} s", flush=True)

    def close(self) -> None:
        self._llm.close()

    def prompts(self, batch: int) -> list[list[int]]:
        """Random token ids, others for each request."""
        vocab, found = self._config["vocab_size"], []
        for _ in range(batch):
            self._number += 1
            generator = random.Random(self._number)
            found.append([generator.randrange(10, vocab - 10) for _ in range(self._options.prompt)])
        return found

    def run(
        self, batch: int, num_tokens: int, after_call: Callable[[Steps], None] = lambda steps: None
    ) -> Run:
        """Answer `batch` new prompts with so many tokens each."""
        prompts = self.prompts(batch)
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, detokenize=False, **self._options.sampling
        )
        steps = Steps(batch, num_tokens, self._host_s)
        with self._watched(steps, after_call):
            began = time.perf_counter()
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        assert lengths == {num_tokens}, f"answers of {lengths} tokens"
        return Run(seconds, steps)

    @contextmanager
    def _watched(self, steps: Steps, after_call: Callable[[Steps], None]) -> Iterator[None]:
        """The engine's calls within, reported to `steps`."""
        engine = self._llm._engine
        assert engine is not None, "the LLM is open"
        step = engine.step

        def timed() -> list[RequestOutputDelta | TokenDeltas]:
            began = time.perf_counter()
            outputs = step()
            steps.add(began, time.perf_counter(), outputs)
            after_call(steps)
            return outputs

        engine.step = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del engine.step

    def _host_s(self) -> float:
        """Scheduling (which launches, too) and updating so far."""
        metrics = self._llm.get_metrics()
        return float(metrics["schedule_s"] + metrics["update_s"])

    def measure(self, batch: int) -> None:
        """One line."""
        options = self._options
        self.run(batch, 8)  # compile what has to be, steps of prompts beside decodes among it
        prefill = [self.run(batch, 1).seconds for _ in range(options.rounds)]
        before = self._drafted()
        runs = [self.run(batch, options.output) for _ in range(options.rounds)]
        first = statistics.median(prefill)
        decode = [(run.seconds - first) / (options.output - 1) for run in runs]
        # Of each round, so that rounds have the same weight. Short answers may have no such step.
        step = [statistics.median(run.steps.seconds) for run in runs if run.steps.seconds]
        outputs = [statistics.median(run.steps.outputs) for run in runs if run.steps.outputs]
        host = [run.steps.host for run in runs if run.steps.host is not None]
        calls = statistics.median(run.steps.num_calls for run in runs)
        num_steps = statistics.median(len(run.steps.seconds) for run in runs)
        if options.speculative:  # rows give other numbers of tokens
            step, outputs, host = [], [], []
        if step:
            self._step_s[batch] = statistics.median(step)
        rates = [batch * options.prompt / seconds for seconds in prefill]
        print(
            f"{self._name} batch {batch}: "
            f"prefill {batch * options.prompt / first / 1e3:.0f}k tokens/s, "
            f"{first * 1e3:.1f} ms (min {min(prefill) * 1e3:.1f}); "
            f"decode {shown(decode, 1e3, 3)} ms, "
            f"step {shown(step, 1e3, 3)} ms, host {shown(host, 1e6, 0)} us, "
            f"outputs {shown(outputs, 1e6, 0)} us; {num_steps:.0f} steps in {calls:.0f} calls",
            flush=True,
        )
        if options.speculative:
            given, right, steps = (
                now - then for now, then in zip(self._drafted(), before, strict=True)
            )
            print(
                f"{self._name} batch {batch}: {right:.0f} of {given:.0f} drafts accepted, "
                f"{1 + right / steps:.2f} tokens a step of a sequence",
                flush=True,
            )
        for name, values, unit, scale in (
            ("prefill", rates, "tokens/s", 1.0),
            ("decode", decode, "ms", 1e3),
            ("step", step, "ms", 1e3),
            ("host", host, "us", 1e6),
            ("outputs", outputs, "us", 1e6),
        ):
            figure = f"{self._name} batch {batch}: {name}, {unit}"
            self.figures[figure] = [value * scale for value in values]

    def _drafted(self) -> tuple[float, ...]:
        """So far: drafts given and accepted, and steps times sequences."""
        names = ("draft_tokens", "accepted_draft_tokens", "step_sequences")
        metrics = self._llm.get_metrics()
        return tuple(float(metrics[f"{name}_total"]) for name in names)

    def profile(self, batch: int, *, prompts: bool = False) -> None:
        """Idle share and the longest kernels, of decode steps or of prompts."""
        profile = Profile()
        if prompts:
            before = self._llm.get_metrics()["steps_total"]
            profile.start()
            self.run(batch, 1)
            profile.stop()
            num_steps = self._llm.get_metrics()["steps_total"] - before
            step_s = 0.0
        else:
            run = self.run(batch, self._options.output, profile.follow)
            profile.end(run.steps)
            num_steps, step_s = profile.num_steps, self._step_s.get(batch, 0.0)
        what = "prompts" if prompts else "decode"
        text = summary(profile.recorded, num_steps, step_s) if num_steps else "too few steps"
        print(f"{self._name} batch {batch} {what}, {num_steps} steps: {text}", flush=True)


class Profile:
    """A profile of the device within a run."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.recorded = profile(activities=[ProfilerActivity.CUDA])
        self.num_steps = 0  # that were profiled, once it is over
        self._from: int | None = None  # steps before it

    def start(self) -> None:
        """From now on."""
        self.recorded.__enter__()

    def stop(self) -> None:
        """Until now."""
        self.recorded.__exit__(None, None, None)

    def follow(self, steps: Steps) -> None:
        """After a call of the engine: from the 20th step on, PROFILED steps."""
        done = len(steps.seconds)
        if self._from is None and done >= UNPROFILED:
            self._from = done
            self.start()
        elif self._from is not None and done - self._from >= PROFILED:
            self.end(steps)

    def end(self, steps: Steps) -> None:
        """The last of them; nothing if it is over, or never began."""
        if self._from is not None and not self.num_steps:
            self.num_steps = len(steps.seconds) - self._from
            self.stop()


def shown(values: Sequence[float], scale: float, digits: int) -> str:
    """The median, or a dash where nothing was measured."""
    return f"{statistics.median(values) * scale:.{digits}f}" if values else "-"


def summary(recorded: Any, steps: int, step_s: float) -> str:
    """Idle share of the device in a step of `step_s` seconds (0: of the profile), and kernels.

    A kernel's time is from its own start, or from the end of the kernel before it if that is later,
    to its end: kernels that start early and wait overlap.
    """
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


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--device", default="cuda", help="cuda, or another device plugin on torch")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer, 2 or more")
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--layers", type=int, help="the first so many of the model's layers")
    parser.add_argument("--quantization", help="weights in another format, as wint2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="idle share and kernels as well")
    parser.add_argument(
        "--sampling", type=json.loads, default={"temperature": 0.0}, help="SamplingParams as JSON"
    )
    parser.add_argument("--speculative", type=json.loads, help="--speculative-config as JSON")
    add_acceptance_option(parser)
    add_json_option(parser)
    options = parser.parse_args()
    unknown = {
        name
        for name in options.models
        if name not in SHAPES and not (Path(name) / "config.json").is_file()
    }
    if unknown:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; possible: {', '.join(SHAPES)}, or a folder "
            "with config.json"
        )
    if options.output < 2:
        parser.error("--output must be at least 2: decode steps are what is measured")
    if options.profile and options.device != "cuda":
        parser.error("--profile counts CUDA kernels; leave it out on another device")
    options.models = options.models or list(MODELS)
    return options


def main() -> int:
    """Measure the models asked for."""
    options = parse_arguments()
    name = options.device
    if options.device == "cuda":
        noise_on_the_device(0)
        name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.rounds} runs, "
          f"{options.prompt} tokens in, {options.output} out, medians")  # fmt: skip
    figures: dict[str, list[float]] = {}
    with synthetic_acceptance(options.acceptance_length, options.speculative):
        for model in options.models:
            figures.update(measured(model, options))
            gc.collect()  # an engine's parts know each other
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print_figures(options, figures)
    return 0


def measured(model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """The lines of one model; its figures."""
    bench = Bench(model, options)
    for batch in options.batch:
        bench.measure(batch)
        if options.profile:
            bench.profile(batch)
    if options.profile:
        bench.profile(max(options.batch), prompts=True)
    bench.close()
    return bench.figures


if __name__ == "__main__":
    sys.exit(main())
