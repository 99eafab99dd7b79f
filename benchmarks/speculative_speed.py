"""Speculative methods on the demo model's tasks: speed compared with none, and what drafting costs.

    python benchmarks/speculative_speed.py --methods mtp:1,3 ngram_match:3,5 none --batch 1 8 32 128
    python benchmarks/speculative_speed.py --overhead      # nothing accepted: a step's whole price
    python benchmarks/speculative_speed.py --equality      # same tokens as without, or exit code 1

All engines, one of them without speculation, run in turns in one process. Questions are held out of
the model's training; answers are greedy unless --temperature says otherwise. `batch` is the number
of streams: that many requests run at once, and the next one follows at once when one ends. A window
is a number of tokens, prompts included: as many as the engine without speculation gives in --window
seconds, the same number for all engines. The streams pause until their next window. A round is one
window of each engine, one after the other.

A figure is the median over rounds of the ratio of tokens per second to the engine without
speculation. After it stand the standard error of that median, estimated from the quartiles, and the
number of rounds: --rounds, and more until that error is at most --error for all methods or
--seconds have passed. `first` is the same ratio over all --warm-up rounds together, in which an
adaptive length starts without measurements. The method `none` is another engine without
speculation: it shows how far equal engines differ.

whole     the model ends its answers. long      answers have --long tokens, even if the model would
end them earlier. decoding  answers have --steady tokens.

tok/step: tokens per decode of a sequence; drafts/tok: fed drafts per token; right: the share of
them that was accepted; drafting: the share of a step that the worker's host spends in drafters. On
a device that only queues work, speculative_profile.py shows what drafting costs there.

Method mtp comes with fd-spec-mtp, eagle3 and dflash with fd-spec-eagle, the others with
fd-speculative.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

from speculative_acceptance import Runs, add_arguments, print_conditions, questions

from fastdeploy_core.api.inputs import normalise_prompts
from fastdeploy_core.types import TokenDeltas, each_delta

REPETITIVE = ("copying", "reciting", "plain_copy")
COUNTED = (
    *("steps_total", "step_sequences_total", "draft_s"),
    *("draft_tokens_total", "accepted_draft_tokens_total"),
)
PLACES = 4  # prompts for each stream, repeated
MEASURES = ("whole", "long", "decoding")
PLAIN = "without"

Round = dict[str, dict[str, Any]]  # the result of each engine's window


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ngram_match", "suffix", "draft_model"],
        help="method or method:k,k; k is 3 otherwise",
    )
    parser.add_argument("--tasks", nargs="+", default=REPETITIVE)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--measures", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument(
        "--cells", nargs="+", type=cell, help="measure:batch instead, in this order"
    )
    parser.add_argument("--window", type=float, default=0.1, help="seconds without speculation")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds that do not count")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--error", type=float, default=0.01, help="that more rounds are for")
    parser.add_argument("--seconds", type=float, default=0.0, help="that more rounds may take")
    parser.add_argument("--long", type=int, default=256, help="tokens of a long answer")
    parser.add_argument("--steady", type=int, default=800, help="tokens of a decoding answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: with top_p 0.95")
    parser.add_argument("--fixed", action="store_true", help="adaptive length off")
    parser.add_argument("--verdicts", action="store_true", help="print what each probe found")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of this process, on a machine with other users",
    )
    parser.add_argument("--overhead", action="store_true", help="benchmark_mode: nothing accepted")
    parser.add_argument("--equality", action="store_true")
    add_arguments(parser)
    options = parser.parse_args()
    options.cells = options.cells or list(product(options.measures, options.batch))
    return options


def cell(named: str) -> tuple[str, int]:
    """A `method:k` of the command line."""
    measure, _, batch = named.partition(":")
    if measure not in MEASURES or not batch.isdigit():
        raise argparse.ArgumentTypeError(
            f"{named!r} is not one of {'|'.join(MEASURES)} with :batch"
        )
    return measure, int(batch)


class Comparison:
    """Engines, each with a method, compared with one without."""

    def __init__(self, options: argparse.Namespace, engines: ExitStack) -> None:
        """engines: the stack that closes them."""
        self.options, self._runs = options, Runs(options)
        self._most = max(batch for _, batch in options.cells)
        self._clock = time.process_time if options.processor_time else time.perf_counter
        self._engines = {PLAIN: engines.enter_context(self._runs.engine(batch=self._most))}
        for named in options.methods:
            method, _, numbers = named.partition(":")
            for k in map(int, (numbers or "3").split(",")):
                label = method if method == "none" else f"{method}:{k}"
                self._engines[label] = engines.enter_context(self._drafting(method, k))
        most = PLACES * max(self._most, 12)
        each = -(-most // len(options.tasks))
        found = [questions(options.model, task, each) for task in options.tasks]
        # As token ids: otherwise the tokenizer's time would decide how many rounds there are.
        encode = self._engines[PLAIN].get_tokenizer().encode
        self._prompts = [encode(prompt) for row in zip(*found, strict=True) for prompt in row]
        self._verdicts = logging.StreamHandler(sys.stdout)
        if options.verdicts:
            logger = logging.getLogger("fastdeploy_core.scheduler.draft_policy")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self._verdicts)

    def _drafting(self, method: str, k: int) -> Any:
        """An engine with the method."""
        if method == "none":
            return self._runs.engine(batch=self._most)
        options = self.options
        settings: dict[str, Any] = {
            "adaptive_length": not options.fixed and not options.overhead,
            "benchmark_mode": options.overhead,
        }
        return self._runs.engine(method, k, self._most, **settings)

    def _streams(self, llm: Any, batch: int, measure: str) -> Streams:
        """The streams of one of the three measures."""
        options = self.options
        lengths = {"whole": options.max_tokens, "long": options.long, "decoding": options.steady}
        return Streams(
            llm,
            self._prompts,
            batch,
            self._clock,
            temperature=options.temperature,
            max_tokens=lengths[measure],
            ignore_eos=measure != "whole",
        )

    def compare(self, batch: int, measure: str) -> list[dict[str, Any]]:
        """Run all engines in turns, in another order each round; returns a row for each method."""
        streams = {
            name: self._streams(engine, batch, measure) for name, engine in self._engines.items()
        }
        for name, each in streams.items():
            each.run(16 * batch)  # create everything that is made on first use
            forget_lengths(self._engines[name])
        window = streams[PLAIN].tokens_in(self.options.window)
        first: list[Round] = []
        rounds: list[Round] = []
        began = time.perf_counter()
        while len(rounds) < self.options.rounds or (
            time.perf_counter() - began < self.options.seconds
            and max(ratio(rounds, name)[1] for name in streams) > self.options.error
        ):
            is_first = len(first) < self.options.warm_up
            (first if is_first else rounds).append(self._round(streams, window, len(rounds)))
            if is_first:
                began = time.perf_counter()
        rows = [
            {"method": name, "batch": batch, "measure": measure, **figures(name, first, rounds)}
            for name in streams
            if name != PLAIN
        ]
        for row in rows if measure == "whole" else ():
            answers = [streams[name].answers for name in (PLAIN, row["method"])]
            row["same"] = all(
                answers[0][n] == answers[1][n] for n in answers[0].keys() & answers[1]
            )
        for each in streams.values():
            each.close()
        return rows

    def _round(self, streams: dict[str, Streams], window: int, number: int) -> Round:
        names = list(streams)
        turn = number // 2 % len(names)
        found = {}
        for name in (names[turn:] + names[:turn])[:: -1 if number % 2 else 1]:
            gc.collect()  # garbage of one window must not be collected in the next
            self._verdicts.setFormatter(logging.Formatter(f"  {name}: %(message)s"))
            found[name] = streams[name].run(window)
        return found


class Streams:
    """Requests of one engine, a fixed number at once; the next one follows at once when one ends.
    They continue from one round to the next, and the first ones have different lengths, so that
    there is neither a start nor an end."""

    def __init__(
        self,
        llm: Any,
        prompts: list[list[int]],
        batch: int,
        clock: Callable[[], float],
        *,
        temperature: float,
        max_tokens: int,
        ignore_eos: bool,
    ) -> None:
        self._llm, self._engine, self._clock = llm, llm._live_engine(), clock
        self._prompts, self._batch = prompts, batch
        self._sampling = {"temperature": temperature, "top_p": 0.95, "seed": 1}
        self._sampling.update(max_tokens=max_tokens, ignore_eos=ignore_eos)
        self._numbers: dict[str, int] = {}
        self._unfinished: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}  # complete answers
        self._ready: deque[Any] = deque()
        self._num_ready = 4 * batch
        for nth in range(batch):
            share = (nth + 1) / batch if ignore_eos else 1.0
            self._engine.add(self._make(max_tokens=max(1, round(share * max_tokens))))

    def _make(self, **other: Any) -> Any:
        from fastdeploy import SamplingParams

        number = len(self._numbers)
        (prompt,) = normalise_prompts([self._prompts[number % len(self._prompts)]])
        request = self._llm._build(prompt, SamplingParams(**{**self._sampling, **other}), 0, None)
        self._numbers[request.request_id], self._unfinished[number] = number, []
        return request

    def tokens_in(self, seconds: float) -> int:
        """The number of tokens that the engine gives in about that time."""
        tokens = 16 * self._batch
        while (found := self.run(tokens))["seconds"] < 0.5 * seconds:
            tokens *= 2
        return max(1, round(speed(found) * seconds))

    def run(self, tokens: int) -> dict[str, Any]:
        """Run until so many tokens have arrived; the last step may give more."""
        engine, ready, outputs = self._engine, self._ready, list[Any]()
        scheduler = engine._core.scheduler
        while len(ready) < self._num_ready:
            ready.append(self._make())
        scheduler._results_s = None  # no step ran since the last round
        counters = scheduler.counters
        num_before = counters.generation_tokens_total
        before, began = self._llm.get_metrics(), self._clock()
        while counters.generation_tokens_total - num_before < tokens:
            for output in engine.step():
                outputs.append(output)
                if not isinstance(output, TokenDeltas) and output.finished:
                    engine.add(ready.popleft() if ready else self._make())
        seconds, after = self._clock() - began, self._llm.get_metrics()
        made, num_answers = counters.generation_tokens_total - num_before, len(self.answers)
        for delta in each_delta(outputs):
            number = self._numbers[delta.request_id]
            for sequence in delta.sequences:
                self._unfinished[number] += sequence.token_ids
            if delta.finished:
                self.answers[number] = self._unfinished.pop(number)
        # As many as the next window may need: making requests is not measured.
        self._num_ready = 4 * self._batch + 2 * (len(self.answers) - num_answers)
        change = {name: after[name] - before[name] for name in COUNTED}
        return {**change, "seconds": seconds, "made": made}

    def close(self) -> None:
        """Abort the running requests."""
        self._engine.abort(list(self._numbers))
        while self._engine.has_work():
            self._engine.step()


def forget_lengths(llm: Any) -> None:
    """Drop what the draft policy learned from other work."""
    policy = llm._live_engine()._core.scheduler._policy
    if policy is not None:
        policy._regimes.clear()
        policy._regime = None


def speed(run: dict[str, Any]) -> float:
    """Tokens per second."""
    found: float = run["made"] / run["seconds"]
    return found


def ratio(rounds: list[Round], name: str) -> tuple[float, float]:
    """Median over rounds, and its standard error if rounds are normally distributed."""
    found = [speed(each[name]) / speed(each[PLAIN]) for each in rounds]
    low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else [0.0] * 3
    return statistics.median(found), 0.93 * (high - low) / len(found) ** 0.5


def figures(name: str, first: list[Round], rounds: list[Round]) -> dict[str, Any]:
    """The figures of one method."""
    row: dict[str, Any] = {"num_rounds": len(rounds)}
    row["ratio"], row["error"] = ratio(rounds, name)
    row["ratios"] = [speed(each[name]) / speed(each[PLAIN]) for each in rounds]
    seconds = {key: sum(each[key]["seconds"] for each in first) for key in (name, PLAIN)}
    row["first"] = seconds[PLAIN] / seconds[name] if first else 0.0
    row["without"] = statistics.median(speed(each[PLAIN]) for each in rounds)
    for key in (name, PLAIN):
        row[f"step_ms_{'with' if key == name else PLAIN}"] = statistics.median(
            1000 * each[key]["seconds"] / max(1, each[key]["steps_total"]) for each in rounds
        )
    made, steps, sequences, seconds_drafting, drafts, right = (
        sum(each[name][key] for each in rounds) for key in ("made", *COUNTED)
    )
    row["tokens_per_step"] = made / max(1, sequences)
    row["drafts_per_token"] = drafts / max(1, made)
    row["acceptance"] = 100 * right / max(1, drafts)
    row["draft_ms"] = 1000 * seconds_drafting / max(1, steps)
    return row


def print_row(row: dict[str, Any]) -> None:
    """Print a figure and its context."""
    line = f"{row['method']:15}{row['batch']:5d} {row['measure']:10}"
    line += f"{row['ratio']:6.3f} ~{row['error']:.3f}"
    line += f"{row['num_rounds']:7d}{row['first']:7.3f}{row['without']:10.0f}"
    line += f"{row['drafts_per_token']:11.2f}{row['acceptance']:9.0f}{row['tokens_per_step']:9.2f}"
    line += f"{row['step_ms_with']:9.3f}{row['step_ms_without']:9.3f}{row['draft_ms']:9.3f}"
    print(line + ("" if row.get("same", True) else "  other tokens than without"), flush=True)


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print_conditions(options)
    rows: list[dict[str, Any]] = []
    with ExitStack() as engines:
        comparison = Comparison(options, engines)
        print(", ".join(options.tasks))
        print(f"{'method':15}{'batch':>5} {'':10}{'ratio':>6} "
            f"{'error':6}{'rounds':>7}{'first':>7}{'none/s':>10}"
            f"{'drafts/tok':>11}{'right %':>9}{'tok/step':>9}{'ms/step':>9}"
            f"{'none':>9}{'drafting':>9}")  # fmt: skip
        # As in an engine's process: permanent objects are not visited by the garbage collector
        # again.
        gc.collect()
        gc.freeze()
        for measure, batch in options.cells:
            for row in comparison.compare(batch, measure):
                rows.append(row)
                print_row(row)
        gc.unfreeze()
    if options.json:
        print(json.dumps(rows))
    if options.equality and not all(row.get("same", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
