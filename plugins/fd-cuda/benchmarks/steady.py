"""Tokens per second of an engine that is always full, without HTTP, and where its steps' time goes.

    python plugins/fd-cuda/benchmarks/steady.py ernie-21b-a3b --streams 256 512
    python plugins/fd-cuda/benchmarks/steady.py ernie-21b-a3b --quantization wint4 --profile

So many streams have a request each, and the next one when it is answered, as in
benchmarks/closed_loop.py. Each begins at a random place of its first answer, and what it would have
written until then is part of its prompt: from the start, steps are what they are after hours.
Greedy, random weights and ids, answers of one length, prefix cache off, no tokenizer.

decodes  median ms of the steps in which all rows decode, and their share of all steps
mixed    the same of those with prompts, and mean tokens of one
waits    share of the time in which the host waits for the device: near 0 the host is the limit
profile  kernels of PROFILED steps in a row, then of as many without prompts; microseconds a step
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from engine import PROFILED, SHAPES, Profile, noise_on_the_device, summary
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.types import Request, SamplingParams, TokenDeltas


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--device", default="cuda", help="cuda, or another device plugin on torch")
    parser.add_argument("--streams", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--quantization", help="weights in another format, as wint4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as int8")
    parser.add_argument("--kv-gb", type=float, help="KV cache; what is left unless given")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--wait", action="store_true", help="print 'ready', read a line, measure")
    return parser.parse_args()


def engine_of(options: argparse.Namespace, config: dict[str, object]) -> LLM:
    """The model with random weights."""
    length, most = options.prompt + options.output + 64, max(options.streams)
    cache = {"kv_cache_memory_bytes": int(options.kv_gb * 1e9)} if options.kv_gb else {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            device=options.device,
            tensor_library="torch",
            max_model_len=length,
            max_num_seqs=most,
            max_num_batched_tokens=max(most, min(options.tokens, length * most)),
            enable_prefix_caching=False,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            **cache,
        )


class Load:
    """Requests of so many streams in an engine."""

    def __init__(
        self, engine: LocalEngine, streams: int, vocab: int, options: argparse.Namespace
    ) -> None:
        self.engine, self._options, self._vocab = engine, options, vocab
        self._draw, self._numbers = random.Random(streams), itertools.count()
        self._left: dict[str, int] = {}  # tokens that each open request has yet to get
        self._unbegun = set[str]()
        self._num_idle, self.is_held = 0, False  # streams that wait while none may begin
        for _ in range(streams):
            self._add(self._draw.randrange(options.output))
        self._unbegun = set(self._left)

    def _add(self, written: int) -> None:
        """The next request of a stream, which has so much of its answer already."""
        options, name = self._options, f"stream-{next(self._numbers)}"
        length = options.output - written
        ids = self._draw.choices(range(10, self._vocab - 10), k=options.prompt + written)
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        self._left[name] = length
        self.engine.add(Request(request_id=name, prompt_token_ids=ids, sampling=params))

    def step(self) -> int:
        """One step of the engine; tokens that came of it."""
        took = 0
        for output in self.engine.step():
            for delta in output if isinstance(output, TokenDeltas) else [output]:
                if delta.error:
                    raise SystemExit(f"{delta.request_id}: {delta.error}")
                number = sum(len(sequence.token_ids) for sequence in delta.sequences)
                self._unbegun.discard(delta.request_id)
                self._left[delta.request_id] -= number
                took += number
                if not self._left[delta.request_id]:
                    del self._left[delta.request_id]
                    self._num_idle += 1
        while self._num_idle and not self.is_held:
            self._add(0)
            self._num_idle -= 1
        return took

    def begin(self) -> None:
        """Until every stream has decoded a little."""
        while self._unbegun:
            self.step()
        for _ in range(8):
            self.step()

    def end(self) -> None:
        """Nothing stays in the engine."""
        self.engine.abort(list(self._left))
        while self.engine.has_work():
            self.engine.step()


def measure(load: Load, seconds: float) -> str:
    """What a line says of so many seconds."""
    decodes, mixed, fed, took = [], [], [], 0
    first = before = load.engine.stats()
    began = last = time.perf_counter()
    while last - began < seconds:
        took += load.step()
        stats, now = load.engine.stats(), time.perf_counter()
        rows = stats.step_sequences_total - before.step_sequences_total
        tokens = stats.step_tokens_total - before.step_tokens_total
        if tokens > rows:
            fed.append(tokens)
        (mixed if tokens > rows else decodes).append((now - last) * 1e3)
        before, last = stats, now
    wall, steps = last - began, len(decodes) + len(mixed)
    parts = [f"{took / wall:9,.0f} output tokens/s, {steps / wall:6.1f} steps/s"]
    for name, times in (("decodes", decodes), ("mixed", mixed)):
        middle = f"{statistics.median(times):.2f} ms" if times else "-"
        parts.append(f"{name} {middle} ({100 * len(times) / max(1, steps):.0f} %)")
    tokens_of_one = f" of {statistics.fmean(fed):.0f} tokens" if fed else ""
    waits = (before.wait_s - first.wait_s) / wall
    return f"{', '.join(parts)}{tokens_of_one}, waits {100 * waits:.0f} %"


def profiled(load: Load, *, prompts: bool) -> str:
    """Kernels of some steps, a step."""
    profile, load.is_held = Profile(), not prompts
    for _ in range(0 if prompts else 4):  # those that are on their way
        load.step()
    profile.start()
    for _ in range(PROFILED):
        load.step()
    profile.stop()
    load.is_held = False
    what = "with prompts" if prompts else "without prompts"
    return f"{PROFILED} steps {what}: {summary(profile.recorded, PROFILED, 0.0)}"


def main() -> int:
    """One line for each number of streams."""
    options = parse_arguments()
    config = SHAPES.get(options.model) or json.loads(
        (Path(options.model) / "config.json").read_text()
    )
    if options.device == "cuda":
        noise_on_the_device(0)
    began = time.perf_counter()
    llm = engine_of(options, config)
    name = f"{Path(options.model).name} {options.quantization or 'bf16'}"
    about = f"{options.prompt} in, {options.output} out, {time.strftime('%Y-%m-%d')}"
    print(f"{name}: ready after {time.perf_counter() - began:.1f} s; {about}", flush=True)
    if options.wait:
        sys.stdin.readline()
    engine = llm._engine
    assert engine is not None, "the LLM is open"
    for streams in options.streams:
        load = Load(engine, streams, int(config["vocab_size"]), options)
        load.begin()
        print(f"{name}, {streams} streams: {measure(load, options.seconds)}", flush=True)
        if options.profile:
            for prompts in (True, False):
                print(profiled(load, prompts=prompts), flush=True)
        load.end()
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
