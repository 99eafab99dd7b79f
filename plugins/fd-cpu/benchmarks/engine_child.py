"""One engine, measured in a process of its own: `python engine_child.py KIND JSON` prints one JSON line.

Kinds: fastdeploy (the whole engine, through LLM), transformers, openvino. Decoding is the difference
between a long and a short answer to the same prompts, so that prompts and start do not count.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SHORT = 1
PROMPT = 16  # tokens before what is decoded
Points = dict[str, tuple[int, int]]


def tokens_per_s(
    points: Points, tokens: int, vocab_size: int, run: Callable[[list[list[int]], int], None]
) -> dict[str, float]:
    """`run(prompts, n)` generates n tokens for each prompt; once to warm up, once to be timed."""
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
            taken = [seconds(prompts(1, prompt), SHORT) for _ in range(3)]
            found[name] = prompt / statistics.median(taken)
        else:
            seconds(prompts(batch, PROMPT), 4)
            short = seconds(prompts(batch, PROMPT), SHORT)
            long = seconds(prompts(batch, PROMPT), SHORT + tokens)
            found[name] = batch * tokens / max(1e-9, long - short)
    return found


def fastdeploy(asked: dict[str, Any]) -> dict[str, Any]:
    """The engine as a program uses it."""
    from fastdeploy import LLM, SamplingParams

    longest = max(prompt for _, prompt in asked["points"].values())
    most = max(batch for batch, _ in asked["points"].values())
    length = max(128, max(longest, PROMPT) + SHORT + asked["tokens"] + 8)
    started = time.perf_counter()
    with LLM(
        asked["model"],
        device=asked["device"],
        quantization=asked["quantization"],
        num_threads=asked["threads"],
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=min(max(2048, longest), length * most),
        kv_cache_memory_bytes=asked["kv_bytes"],
        enable_prefix_caching=False,
    ) as llm:
        loaded = time.perf_counter() - started

        def run(prompts: list[list[int]], answer: int) -> None:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=answer,
                ignore_eos=True,
                detokenize=False,
            )
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            llm.generate(inputs, params, use_tqdm=False)

        found = tokens_per_s(asked["points"], asked["tokens"], asked["vocab_size"], run)
    return {"tokens_per_s": found, "load_s": loaded}


def transformers(asked: dict[str, Any]) -> dict[str, Any]:
    """Plain generate of the model in bfloat16."""
    import torch
    import transformers as library

    torch.set_num_threads(asked["threads"])
    started = time.perf_counter()
    model = library.AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.bfloat16
    ).eval()
    loaded = time.perf_counter() - started

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

    found = tokens_per_s(asked["points"], asked["tokens"], asked["vocab_size"], run)
    return {"tokens_per_s": found, "load_s": loaded, "version": library.__version__}


def openvino(asked: dict[str, Any]) -> dict[str, Any]:
    """OpenVINO GenAI on the GGUF file."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    started = time.perf_counter()
    settings = {"INFERENCE_NUM_THREADS": asked["threads"]}
    pipe = genai.LLMPipeline(asked["model"], "CPU", **settings)
    loaded = time.perf_counter() - started

    def run(prompts: list[list[int]], answer: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = answer
        config.ignore_eos, config.do_sample = True, False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipe.generate(inputs, config)

    found = tokens_per_s(asked["points"], asked["tokens"], asked["vocab_size"], run)
    return {"tokens_per_s": found, "load_s": loaded, "version": openvino.__version__}


if __name__ == "__main__":
    kinds = {"fastdeploy": fastdeploy, "transformers": transformers, "openvino": openvino}
    request = json.loads(sys.argv[2])
    request["points"] = {name: tuple(point) for name, point in request["points"].items()}
    answer = kinds[sys.argv[1]](request)
    print("\n" + json.dumps(answer), flush=True)
