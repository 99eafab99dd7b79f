"""Speculative methods on the demo model's tasks: speed beside none, and what drafting costs.

    python benchmarks/speculative_speed.py --methods mtp:1,3 ngram_match:3,5 --batch 1 8 32 128
    python benchmarks/speculative_speed.py --methods mtp:3 none:1@1,8   # the latter for batch 1 and 8 only
    python benchmarks/speculative_speed.py --overhead      # nothing accepted: a step's whole price
    python benchmarks/speculative_speed.py --equality      # the same tokens as without, or exit status 1

Engines with a method and one without run in turns in one process; questions are held out of the model's
training, answers are greedy unless --temperature says otherwise. Ratios of tokens per second are taken
within a round; a figure is the median over rounds, behind it the standard error of that median, as the quartiles
tell it, and the number of rounds: behind --warm-up others --rounds, and more until that error is at most --error
or --seconds have passed. Each begins with an adaptive length that knows nothing yet, and is printed as soon as it
is known. The method `none` is another engine without speculation: what two engines differ by that are the same.

`batch` is the number of streams: so many requests run at once, and the next one arrives at once when one ends. A round
is --window seconds of that, and the streams wait for the next one meanwhile. Prompts are included.

whole     the model ends its answers.
long      answers have --long tokens, whatever the model would like to end.
decoding  answers have --steady tokens.

tok/step is per decode of a sequence, drafts/tok fed drafts per token, right the share of them that was, drafting the part of a step that the worker's
host spends on drafters. On a device that only queues work, speculative_profile.py tells what drafting costs there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
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
PLACES = 4  # prompts for each stream, over and over
MEASURES = ("whole", "long", "decoding")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ngram_match", "suffix", "draft_model"],
        help="method, method:k,k or method:k,k@batch,batch",
    )
    parser.add_argument("--k", nargs="+", type=int, default=[3], help="where no method:k,k says")
    parser.add_argument("--tasks", nargs="+", default=REPETITIVE)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--error", type=float, default=0.01, help="that more rounds are for")
    parser.add_argument("--seconds", type=float, default=0.0, help="that more rounds may take")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--measures", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument("--steady", type=int, default=800, help="tokens of a decoding answer")
    parser.add_argument("--window", type=float, default=0.2, help="seconds of a round")
    parser.add_argument("--long", type=int, default=256, help="tokens of a long answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: with top_p 0.95")
    parser.add_argument("--fixed", action="store_true", help="adaptive length off")
    parser.add_argument(
        "--disable-above", type=int, default=0, help="disable_by_batch_size: what being off costs"
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of this process, on a machine with other users",
    )
    parser.add_argument("--overhead", action="store_true", help="benchmark_mode: nothing accepted")
    parser.add_argument("--equality", action="store_true")
    add_arguments(parser)
    return parser.parse_args()


class Comparison:
    """Engines with a method beside one without."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self._runs = options, Runs(options)
        self._most = max(options.batch)
        self.plain = self._runs.engine(batch=self._most)
        self._clock = time.process_time if options.processor_time else time.perf_counter
        most = PLACES * max(self._most, 12)
        each = -(-most // len(options.tasks))
        found = [questions(options.model, task, each) for task in options.tasks]
        # As token ids: the tokenizer's time is no part of what is measured, but of how many rounds there are.
        encode = self.plain.get_tokenizer().encode
        self._prompts = [encode(prompt) for row in zip(*found, strict=True) for prompt in row]

    def drafting(self, method: str, k: int) -> Any:
        """An engine with the method."""
        if method == "none":
            return self._runs.engine(batch=self._most)
        options = self.options
        settings: dict[str, Any] = {
            "adaptive_length": not options.fixed and not options.overhead,
            "disable_by_batch_size": options.disable_above or None,
            "benchmark_mode": options.overhead,
        }
        return self._runs.engine(method, k, self._most, **settings)

    def streams(self, llm: Any, batch: int, measure: str) -> Streams:
        """Of one of the three measures."""
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

    def compare(self, llm: Any, batch: int, measure: str) -> dict[str, Any]:
        """Both engines in turns; who goes first changes from round to round."""
        forget_lengths(llm)
        streams = {
            name: self.streams(engine, batch, measure)
            for name, engine in (("with", llm), ("without", self.plain))
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in streams}
        number = -self.options.warm_up
        began = time.perf_counter()
        while number < self.options.rounds or (
            time.perf_counter() - began < self.options.seconds
            and ratio({name: speeds(rounds) for name, rounds in runs.items()})[1]
            > self.options.error
        ):
            order = list(streams)[:: -1 if number % 2 else 1]
            for name in order:
                gc.collect()  # what a round leaves is not for the next one to clear
                found = streams[name].run(self.options.window)
                if number >= 0:
                    runs[name].append(found)
            number += 1
        row: dict[str, Any] = {"batch": batch, "measure": measure}
        for name, rounds in runs.items():
            row[name] = speeds(rounds)
            row[f"step_ms_{name}"] = statistics.median(
                1000 * run["seconds"] / max(1, run["steps_total"]) for run in rounds
            )
        made, steps, sequences, seconds, drafts, right = (
            sum(run[key] for run in runs["with"]) for key in ("made", *COUNTED)
        )
        row["tokens_per_step"] = made / max(1, sequences)
        row["drafts_per_token"] = drafts / max(1, made)
        row["acceptance"] = 100 * right / max(1, drafts)
        row["draft_ms"] = 1000 * seconds / max(1, steps)
        if measure == "whole":
            answers = [each.answers for each in streams.values()]
            row["same"] = all(
                answers[0][n] == answers[1][n] for n in answers[0].keys() & answers[1]
            )
        for each in streams.values():
            each.close()
        return row


class Streams:
    """Requests of one engine, so many at once; the next one follows at once when one ends. They go on from one
    round to the next, and the first ones are of different lengths, so that there is neither a begin nor an end."""

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
        self.answers: dict[int, list[int]] = {}  # complete ones
        self._ready: deque[Any] = deque()
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

    def run(self, window: float) -> dict[str, Any]:
        """So many seconds of it."""
        engine, ready, outputs = self._engine, self._ready, list[Any]()
        while len(ready) < 4 * self._batch:
            ready.append(self._make())
        engine._core.scheduler._busy_since = None  # nobody has worked since the last round
        before, began = self._llm.get_metrics(), self._clock()
        while self._clock() - began < window:
            for output in engine.step():
                outputs.append(output)
                if not isinstance(output, TokenDeltas) and output.finished:
                    engine.add(ready.popleft() if ready else self._make())
        seconds, after = self._clock() - began, self._llm.get_metrics()
        made = 0
        for delta in each_delta(outputs):
            number = self._numbers[delta.request_id]
            for sequence in delta.sequences:
                self._unfinished[number] += sequence.token_ids
                made += len(sequence.token_ids)
            if delta.finished:
                self.answers[number] = self._unfinished.pop(number)
        change = {name: after[name] - before[name] for name in COUNTED}
        return {**change, "seconds": seconds, "made": made}

    def close(self) -> None:
        """End what goes on."""
        self._engine.abort(list(self._numbers))
        while self._engine.has_work():
            self._engine.step()


def speeds(rounds: list[dict[str, Any]]) -> list[float]:
    """Tokens per second of each."""
    return [run["made"] / run["seconds"] for run in rounds]


def forget_lengths(llm: Any) -> None:
    """What was learned on other work."""
    length = llm._live_engine()._core.scheduler._length
    if length is not None:
        length._regimes.clear()
        length._now = length._last = None
        length.rests = 0
        length._num_rows = -1


def ratio(row: dict[str, Any]) -> tuple[float, float]:
    """Median over rounds, and its standard error if rounds differ as by a normal distribution."""
    found = [a / b for a, b in zip(row["with"], row["without"], strict=True)]
    low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else [0.0] * 3
    return statistics.median(found), 0.93 * (high - low) / len(found) ** 0.5


def print_row(method: str, k: int, row: dict[str, Any]) -> None:
    """A figure, and what belongs to it."""
    found, error = ratio(row)
    line = f"{method:12}{k:3d}{row['batch']:6d} {row['measure']:10}{found:6.3f} ~{error:.3f}"
    line += f"{len(row['with']):7d}{statistics.median(row['without']):10.0f}"
    line += f"{row['drafts_per_token']:11.2f}{row['acceptance']:9.0f}{row['tokens_per_step']:9.2f}"
    line += f"{row['step_ms_with']:9.3f}{row['step_ms_without']:9.3f}{row['draft_ms']:9.3f}"
    print(line + ("" if row.get("same", True) else "  other tokens than without"), flush=True)


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print_conditions(options)
    comparison, rows = Comparison(options), list[dict[str, Any]]()
    print(", ".join(options.tasks))
    print(f"{'method':12}{'k':>3}{'batch':>6} {'':10}{'ratio':>6} {'error':6}{'rounds':>7}{'none/s':>10}"
          f"{'drafts/tok':>11}{'right %':>9}{'tok/step':>9}{'ms/step':>9}{'none':>9}{'drafting':>9}")  # fmt: skip
    for named in options.methods:
        named, _, batches = named.partition("@")
        method, _, numbers = named.partition(":")
        wanted = list(map(int, batches.split(","))) if batches else options.batch
        for k in map(int, numbers.split(",")) if numbers else options.k:
            with comparison.drafting(method, k) as llm:
                # As in an engine's process: what there is for good is not looked through again and again.
                gc.collect()
                gc.freeze()
                for batch, measure in product(wanted, options.measures):
                    row = comparison.compare(llm, batch, measure)
                    rows.append({"method": method, "k": k, **row})
                    print_row(method, k, row)
            gc.unfreeze()
            gc.collect()
    comparison.plain.close()
    if options.json:
        print(json.dumps(rows))
    if options.equality and not all(row.get("same", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
