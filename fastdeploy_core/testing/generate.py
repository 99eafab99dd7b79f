"""Greedy tokens of a model on a device, in a process of its own; used by the conformance kit.

    python -m fastdeploy_core.testing.generate < JSON: {"model", "args", "prompts", "max_tokens"}

Prompts are token ids. The last line printed is a JSON list of token id lists, run twice: all
prompts together, then one by one.
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
    """{"together": ..., "alone": ...}; a fresh process, because one process has one library."""
    order = {
        "model": str(model),
        "args": {"num_threads": 1, "num_gpu_blocks_override": 128} | engine_args,
        "prompts": prompts,
        "max_tokens": max_tokens,
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(
        [sys.executable, "-P", "-m", "fastdeploy_core.testing.generate"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    if result.returncode != 0:
        raise AssertionError(f"generation failed: {result.stderr.strip()[-3000:]}")
    answer: dict[str, list[list[int]]] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer


def main() -> int:
    """Generate and print."""
    from fastdeploy_core.api.llm import LLM
    from fastdeploy_core.types import SamplingParams

    order = json.loads(sys.stdin.read())
    params = SamplingParams(
        temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False
    )
    llm = LLM(order["model"], skip_tokenizer_init=True, **order["args"])
    try:
        prompts = order["prompts"]
        together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, False)]
        alone = [
            next(list(o.outputs[0].token_ids) for o in llm.generate([prompt], params, False))
            for prompt in prompts
        ]
    finally:
        llm.close()
    sys.stdout.write(json.dumps({"together": together, "alone": alone}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
