"""Speculative methods on the demo model's tasks: speed beside none, and what drafting costs.

    python benchmarks/speculative_speed.py --methods mtp:1,2,3 ngram_match:3,5 --batch 1 8 32 128
    python benchmarks/speculative_speed.py --overhead      # nothing accepted: a step's whole price
    python benchmarks/speculative_speed.py --equality      # the same tokens as without, or exit status 1

An engine with the method and one without run in turns in one process, with so many requests at once;
questions are held out of the model's training, answers are greedy. Ratios are taken within a round, figures
are medians over rounds. Three things are measured:

whole     requests from their arrival to their last token, prompts included; answers end where the model ends
          them, or at --max-tokens. A batch lasts until its slowest answer is complete.
long      the same with answers of --long tokens each, whatever the model would like to end.
decoding  the engine alone while every answer grows: from where all have begun until they have --steady tokens
          on average. As a server does whose batch is kept full.

tok/step and ms/step are of decoding; drafting is the part of a step that the worker's host spends on
drafters. On a device that only queues work, speculative_profile.py tells what drafting costs there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

from speculative_acceptance import Runs, add_arguments, generate, print_conditions, questions

from fastdeploy_core.api.inputs import normalise_prompts
from fastdeploy_core.types import TokenDeltas, each_delta

REPETITIVE = ("copying", "reciting", "plain_copy")
COUNTED = ("steps_total", "step_sequences_total", "draft_s", "draft_tokens_total")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["ngram_match", "suffix", "draft_model"])
    parser.add_argument("--k", nargs="+", type=int, default=[3], help="where no method:k,k says")
    parser.add_argument("--tasks", nargs="+", default=REPETITIVE)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steady", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--least", type=int, default=6, help="requests of a round, at least")
    parser.add_argument("--long", type=int, default=256, help="tokens of a long answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: with top_p 0.95")
    parser.add_argument("--fixed", action="store_true", help="adaptive length off")
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

    def drafting(self, method: str, k: int) -> Any:
        """An engine with the method."""
        settings = {"adaptive_length": not self.options.fixed and not self.options.overhead}
        if self.options.overhead:
            settings["benchmark_mode"] = True
        return self._runs.engine(method, k, self._most, **settings)

    def prompts(self, batch: int) -> list[str]:
        """Questions for rounds of so many requests at once."""
        options = self.options
        count = batch * -(-options.least // batch)
        each = -(-count // len(options.tasks))
        found = [questions(options.model, task, each) for task in options.tasks]
        return [prompt for row in zip(*found, strict=True) for prompt in row][:count]

    def play(self, llm: Any, batch: int, *, is_long: bool = False) -> dict[str, Any]:
        """All questions, so many at a time."""
        max_tokens = self.options.long if is_long else self.options.max_tokens
        prompts, total = self.prompts(batch), dict[str, Any]()
        seconds = tokens = 0.0
        answers: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            part = prompts[first : first + batch]
            took, made, change = generate(
                llm,
                part,
                max_tokens,
                ignore_eos=is_long,
                temperature=self.options.temperature,
                clock=time.process_time if self.options.processor_time else time.perf_counter,
                answers=answers,
            )
            seconds, tokens = seconds + took, tokens + made
            total = {name: total.get(name, 0) + value for name, value in change.items()}
        return {**total, "seconds": seconds, "tokens": tokens, "answers": answers}

    def decode(self, llm: Any, batch: int) -> dict[str, float]:
        """Steps in which every answer grows, over a question of each task at least."""
        count = batch * -(-len(self.options.tasks) // batch)
        prompts, total = self.prompts(batch)[:count], Counter[str]()
        for first in range(0, len(prompts), batch):
            total.update(self._decode(llm, prompts[first : first + batch]))
        return total

    def _decode(self, llm: Any, prompts: list[str]) -> dict[str, float]:
        from fastdeploy import SamplingParams

        options, engine, names = self.options, llm._live_engine(), list[str]()
        clock = time.process_time if options.processor_time else time.perf_counter
        params = SamplingParams(
            temperature=options.temperature, top_p=0.95, seed=1, max_tokens=900, ignore_eos=True
        )
        for prompt in normalise_prompts(prompts):
            request = llm._build(prompt, params, 0, None)
            names.append(request.request_id)
            engine.add(request)
        begun: set[str] = set()
        while len(begun) < len(prompts):
            begun.update(delta.request_id for delta in each_delta(engine.step()))
        before, began, made, is_over = llm.get_metrics(), clock(), 0, False
        while made < options.steady * len(prompts) and not is_over:
            for output in engine.step():
                if isinstance(output, TokenDeltas):
                    made += len(output.token_ids)
                else:
                    made += sum(len(sequence.token_ids) for sequence in output.sequences)
                    is_over |= output.finished
        seconds, after = clock() - began, llm.get_metrics()
        engine.abort(names)
        while engine.has_work():
            engine.step()
        change = {name: after[name] - before[name] for name in COUNTED}
        return {**change, "seconds": seconds, "made": made}

    def compare(self, llm: Any, batch: int) -> dict[str, Any]:
        """Both engines in turns."""
        engines = {"with": llm, "without": self.plain}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        longs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        steady: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(1 + self.options.rounds):
            for name, engine in engines.items():
                own = self.play(engine, batch)
                long, decoded = self.play(engine, batch, is_long=True), self.decode(engine, batch)
                if number:  # the first round warms up
                    runs[name].append(own)
                    longs[name].append(long)
                    steady[name].append(decoded)
        row: dict[str, Any] = {"batch": batch}
        for name, found in steady.items():
            row |= {
                f"whole_{name}": [r["tokens"] / r["seconds"] for r in runs[name]],
                f"long_{name}": [r["tokens"] / r["seconds"] for r in longs[name]],
                f"decode_{name}": [r["made"] / r["seconds"] for r in found],
                f"step_ms_{name}": statistics.median(
                    1000 * r["seconds"] / max(1, r["steps_total"]) for r in found
                ),
            }
        last = steady["with"][-1]
        row["tokens_per_step"] = last["made"] / max(1, last["step_sequences_total"])
        row["draft_ms"] = 1000 * last["draft_s"] / max(1, last["steps_total"])
        row["drafts_per_token"] = last["draft_tokens_total"] / max(1, last["made"])
        row["same"] = runs["with"][-1]["answers"] == runs["without"][-1]["answers"]
        return row


def ratio(row: dict[str, Any], name: str) -> float:
    """Median over rounds."""
    pairs = zip(row[f"{name}_with"], row[f"{name}_without"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print_conditions(options)
    comparison, rows = Comparison(options), list[dict[str, Any]]()
    print(
        f"{', '.join(options.tasks)}\n"
        f"\n{'method':14}{'k':>3}{'batch':>7}{'whole':>8}{'long':>7}{'decoding':>10}{'tokens/s':>10}"
        f"{'without':>10}{'tok/step':>10}{'drafts/tok':>12}{'ms/step':>9}{'without':>9}{'drafting':>10}"
    )
    for named in options.methods:
        method, _, numbers = named.partition(":")
        for k in map(int, numbers.split(",")) if numbers else options.k:
            with comparison.drafting(method, k) as llm:
                for batch in options.batch:
                    row = comparison.compare(llm, batch)
                    rows.append({"method": method, "k": k, **row})
                    print(
                        f"{method:14}{k:3d}{batch:7d}{ratio(row, 'whole'):8.2f}{ratio(row, 'long'):7.2f}"
                        f"{ratio(row, 'decode'):10.2f}{statistics.median(row['decode_with']):10.0f}"
                        f"{statistics.median(row['decode_without']):10.0f}{row['tokens_per_step']:10.2f}"
                        f"{row['drafts_per_token']:12.2f}{row['step_ms_with']:9.3f}"
                        f"{row['step_ms_without']:9.3f}{row['draft_ms']:10.3f}"
                        + ("" if row["same"] else "  other tokens than without"),
                        flush=True,
                    )
    comparison.plain.close()
    if options.json:
        print(json.dumps(rows))
    if options.equality and not all(row["same"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
