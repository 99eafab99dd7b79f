r"""Where a decode step's time goes, by the engine's own clocks.

    python benchmarks/decode_step.py models/ernie-tiny --device x86 --num-threads 2
    python benchmarks/decode_step.py DIR --device x86 \
        --quantization '{"quantization": "w4a8", "lm_head": true}'

For each batch: greedy answers of --tokens tokens to prompts of 16 tokens, in several rounds; the
round with the fastest steps is shown, because other work disturbed it least. The prompts' step
counts as one of its steps. The parts add up if the device takes one step at a time; if steps
overlap, scheduling happens during the forward pass.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import time

from fastdeploy import LLM, SamplingParams

PROMPT = 16
CLOCKS = ("generation_tokens_total", "schedule_s", "wait_s", "update_s", "execute_s", "model_s")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def round_us(llm: LLM, prompts: list[dict[str, list[int]]], tokens: int) -> dict[str, float]:
    """Microseconds a step, by part."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before, began = llm.get_metrics(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    whole, after = time.perf_counter() - began, llm.get_metrics()
    generated, *seconds = (after[name] - before[name] for name in CLOCKS)
    steps = generated / len(prompts)
    schedule, wait, update, execute, model = (s / steps * 1e6 for s in seconds)
    whole *= 1e6 / steps
    return {
        "whole": whole,
        "forward pass": model,
        "drawing, reading": execute - model,
        "scheduling": schedule + wait - execute,
        "results": update,
        "answers": whole - schedule - wait - update,
    }


def main() -> None:
    """One line a batch."""
    options = parse_arguments()
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {platform.machine()}, Python", end=" ")
    print(f"{platform.python_version()}; load {os.getloadavg()[0]:.1f}; us of a step")
    numbers = random.Random(0)
    for batch in options.batches:
        with LLM(
            options.model,
            device=options.device,
            quantization=options.quantization,
            num_threads=options.num_threads,
            max_num_seqs=batch,
            max_model_len=PROMPT + options.tokens,
            max_num_batched_tokens=max(64, batch * PROMPT),
            kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False,
        ) as llm:
            prompts = [
                {"prompt_token_ids": [numbers.randrange(300, 1000) for _ in range(PROMPT)]}
                for _ in range(batch)
            ]
            rounds = [round_us(llm, prompts, options.tokens) for _ in range(options.rounds)]
        best = min(rounds, key=lambda parts: parts["whole"])
        found = ", ".join(f"{name} {us:.0f}" for name, us in best.items())
        print(f"batch {batch:3}: {found}", flush=True)


if __name__ == "__main__":
    main()
