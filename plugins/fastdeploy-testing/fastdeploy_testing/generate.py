"""Tokens of a model on a device, in a process of its own; used by the conformance kit.

    python -m fastdeploy_testing.generate < JSON: {"model", "args", "prompts", "max_tokens", ...}

Prompts are token ids. The last line printed is a JSON object: the answers' token ids, all prompts
together, then one by one, and the engine's counters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def greedy_tokens(
    model: Path, prompts: list[list[int]], *, max_tokens: int = 16, **engine_args: Any
) -> dict[str, list[list[int]]]:
    """{"together": ..., "alone": ...}"""
    answer = sampled_tokens(model, prompts, [{}], max_tokens=max_tokens, **engine_args)
    runs: list[dict[str, list[list[int]]]] = answer["runs"]
    return runs[0]


def sampled_tokens(
    model: Path,
    prompts: list[list[int]],
    samplings: list[dict[str, Any]],
    *,
    max_tokens: int = 16,
    num_logprobs: int = 0,
    **engine_args: Any,
) -> dict[str, Any]:
    """{"runs": one result like greedy_tokens' per sampling, "metrics": ...}, from a new process,
    because a process has one tensor library. An empty sampling is greedy; seeds are the prompts'
    indices. `num_logprobs`: with "logprobs", of so many tokens at each greedy one, by their id (a
    string)."""
    order = {
        "model": str(model),
        # No grammar is asked for: which of them are installed must not matter.
        "args": {
            **{"num_threads": 1, "num_gpu_blocks_override": 128, "guided_decoding_backend": "off"},
            **engine_args,
        },
        "prompts": prompts,
        "max_tokens": max_tokens,
        "samplings": samplings,
        "num_logprobs": num_logprobs,
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(
        [sys.executable, "-P", "-m", "fastdeploy_testing.generate"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    if result.returncode != 0:
        said = result.stderr.strip()[-3000:] or "it said nothing"
        raise AssertionError(f"generation failed: {said.splitlines()[-1]}\n{said}")
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer


def main() -> int:
    """Generate and print."""
    from fastdeploy_core.api.llm import LLM

    order = json.loads(sys.stdin.read())
    llm = LLM(order["model"], skip_tokenizer_init=True, **order["args"])
    try:
        runs = [_run(llm, order, sampling) for sampling in order["samplings"]]
        logprobs = _logprobs(llm, order) if order["num_logprobs"] else []
        metrics = llm.get_metrics()
    finally:
        llm.close()
    sys.stdout.write(json.dumps({"runs": runs, "logprobs": logprobs, "metrics": metrics}) + "\n")
    return 0


def _run(llm: Any, order: dict[str, Any], sampling: dict[str, Any]) -> dict[str, list[list[int]]]:
    from fastdeploy_core.types import SamplingParams

    prompts = order["prompts"]
    params = [
        SamplingParams(
            **{"temperature": 0.0, "seed": 100 + number, **sampling},
            max_tokens=order["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(len(prompts))
    ]
    together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, False)]
    alone = [
        next(list(o.outputs[0].token_ids) for o in llm.generate([prompt], [own], False))
        for prompt, own in zip(prompts, params, strict=True)
    ]
    return {"together": together, "alone": alone}


def _logprobs(llm: Any, order: dict[str, Any]) -> list[list[dict[int, float]]]:
    """Of each prompt's greedy tokens: the log-probabilities of the likeliest tokens there."""
    from fastdeploy_core.types import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=order["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=order["num_logprobs"],
    )
    return [
        [{n: one.logprob for n, one in at.items()} for at in o.outputs[0].logprobs]
        for o in llm.generate(order["prompts"], params, False)
    ]


if __name__ == "__main__":
    sys.exit(main())
