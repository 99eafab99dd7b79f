"""One engine in a process of its own: `python engine_child.py KIND JSON` says when it is ready,
then measures the points that it reads, a JSON object per line, and answers each with one.

Kinds: fastdeploy (the whole engine, through LLM), transformers, openvino. Decoding is the time from
the first token to the last; of engines that do not tell, the difference between a long and a short
answer.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHORT = 1
PROMPT = 16  # tokens before what is decoded
REPEATS = 3
Points = dict[str, tuple[int, int]]
Run = Callable[[list[list[int]], int], float | None]  # seconds from the first token to the last


def tokens_per_s(points: Points, tokens: int, vocab_size: int, run: Run) -> dict[str, float]:
    """`run(prompts, n)` generates n tokens for each prompt: medians of some, after one to warm
    up."""
    found = {}
    for name, (batch, prompt) in points.items():
        stream = random.Random(f"{name}")

        def prompts(count: int, length: int, stream: random.Random = stream) -> list[list[int]]:
            return [
                [stream.randrange(300, vocab_size) for _ in range(length)] for _ in range(count)
            ]

        def seconds(asked: list[list[int]], answer: int) -> float:
            started = time.perf_counter()
            run(asked, answer)
            return time.perf_counter() - started

        if prompt:
            seconds(prompts(1, prompt), SHORT)
            taken = [seconds(prompts(1, prompt), SHORT) for _ in range(REPEATS)]
            found[name] = prompt / statistics.median(taken)
        else:
            seconds(prompts(batch, PROMPT), 4)
            taken = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                decoding = run(prompts(batch, PROMPT), SHORT + tokens)
                if decoding is None:
                    whole = time.perf_counter() - started
                    decoding = whole - seconds(prompts(batch, PROMPT), SHORT)
                taken.append(decoding)
            found[name] = batch * tokens / max(1e-9, statistics.median(taken))
    return found


@contextmanager
def fastdeploy(asked: dict[str, Any]) -> Iterator[Run]:
    """The engine as a program uses it."""
    from fastdeploy import LLM, SamplingParams

    longest = max(prompt for _, prompt in asked["points"].values())
    most = max(batch for batch, _ in asked["points"].values())
    length = max(128, max(longest, PROMPT) + SHORT + asked["tokens"] + 8)
    with LLM(
        asked["model"],
        device=asked["device"],
        quantization=asked["quantization"],
        weight_cache=asked["weight_cache"],
        num_threads=asked["threads"],
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=min(max(2048, longest), length * most),
        kv_cache_memory_bytes=asked["kv_bytes"],
        enable_prefix_caching=False,
    ) as llm:

        def run(prompts: list[list[int]], answer: int) -> float:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=answer,
                ignore_eos=True,
                detokenize=False,
            )
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            made = [output.metrics for output in llm.generate(inputs, params, use_tqdm=False)]
            first = min(metrics.first_token_time or 0.0 for metrics in made)
            return max(metrics.last_token_time or 0.0 for metrics in made) - first

        yield run


@contextmanager
def transformers(asked: dict[str, Any]) -> Iterator[Run]:
    """Plain generate of the model in bfloat16."""
    import torch
    import transformers as library

    torch.set_num_threads(asked["threads"])
    model = library.AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.bfloat16
    ).eval()

    def run(prompts: list[list[int]], answer: int) -> None:
        with torch.inference_mode():
            model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                do_sample=False,
                max_new_tokens=answer,
                min_new_tokens=answer,
                eos_token_id=None,
                pad_token_id=0,
            )

    yield run


@contextmanager
def openvino(asked: dict[str, Any]) -> Iterator[Run]:
    """OpenVINO GenAI on the GGUF file."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    settings = {"INFERENCE_NUM_THREADS": asked["threads"]}
    pipe = genai.LLMPipeline(asked["model"], "CPU", **settings)

    def run(prompts: list[list[int]], answer: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = answer
        config.ignore_eos, config.do_sample = True, False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipe.generate(inputs, config)

    yield run


def main() -> None:
    """What libraries print must not come between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kinds = {"fastdeploy": fastdeploy, "transformers": transformers, "openvino": openvino}
    asked = json.loads(sys.argv[2])
    started = time.perf_counter()
    with kinds[sys.argv[1]](asked) as run:
        print(json.dumps({"load_s": time.perf_counter() - started}), file=answers, flush=True)
        for line in sys.stdin:
            points = {name: tuple(point) for name, point in json.loads(line).items()}
            found = tokens_per_s(points, asked["tokens"], asked["vocab_size"], run)
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
