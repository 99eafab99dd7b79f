"""What sleep gives back of a GPU's memory, how long waking takes, and whether answers are the same.

    python plugins/fd-rollout/benchmarks/sleep.py ernie-0.3b

Makes two random checkpoints of the size, so that new weights can be put into place, too. Prints one
line of JSON for each step; memory is the driver's figure, times are seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.errors import FastDeployError

ROOT = Path(__file__).parents[3]
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 16, 200, 64
GIB = 1024**3


def used() -> int:
    """Bytes of the GPU that are not free."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds it took."""
    start = time.perf_counter()
    found = call()
    torch.cuda.synchronize()
    return found, round(time.perf_counter() - start, 3)


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "ernie-0.3b"
    with tempfile.TemporaryDirectory() as made:
        folders = []
        for seed in (1, 2):
            folder = Path(made) / f"model{seed}"
            make = [sys.executable, str(ROOT / "benchmarks/random_model.py"), size, str(folder)]
            make += ["--weights", "--seed", str(seed)]
            subprocess.run(make, check=True, capture_output=True)
            folders.append(folder)
        run(*folders)


def run(first: Path, second: Path) -> None:
    """All steps, on one engine."""
    at_start = used()
    llm = LLM(
        first, device="cuda", tensor_library="torch", enable_rollout=True, skip_tokenizer_init=True
    )
    prompts = [
        [100 + (7 * row + 3 * place) % 5000 for place in range(PROMPT_TOKENS)]
        for row in range(NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)

    def ask() -> Any:
        llm.reset_prefix_cache()
        return [
            (list(out.outputs[0].token_ids), out.outputs[0].cumulative_logprob)
            for out in llm.generate(prompts, params, use_tqdm=False)
        ]

    ask()
    answers = ask()
    awake = used()
    show(step="awake", gib=round(awake / GIB, 2), before_engine_gib=round(at_start / GIB, 2))
    for level in (1, 2):
        slept, sleep_s = timed(lambda level=level: llm.sleep(level))
        asleep = used()
        share = (awake - asleep) / awake
        show(
            step=f"sleep {level}", seconds=sleep_s, gib=round(asleep / GIB, 2),
            freed_of_all=round(share, 4), said_gib=round(slept["freed_bytes"] / GIB, 2),
        )  # fmt: skip
        _, wake_s = timed(llm.wake_up)
        show(step=f"wake {level}", seconds=wake_s, gib=round(used() / GIB, 2))
        show(step=f"same answers after {level}", same=ask() == answers)
    _, update_s = timed(lambda: llm.update_weights(str(second)))
    others = ask()
    show(step="update", seconds=update_s, changed=others != answers, gib=round(used() / GIB, 2))
    try:
        llm.update_weights(str(second / "nothing"))
    except FastDeployError as error:
        show(step="failed update", same=ask() == others, error=str(error)[:80])
    _, again_s = timed(lambda: llm.update_weights(str(first)))
    show(step="update back", seconds=again_s, same=ask() == answers)
    llm.sleep(1)
    llm.wake_up(tags=["weights"])
    half = used()
    llm.update_weights(str(second))
    llm.wake_up()
    show(step="update between wakes", same=ask() == others, half_awake_gib=round(half / GIB, 2))
    llm.close()
    show(step="closed", gib=round(used() / GIB, 2))
    with LLM(second, device="cuda", tensor_library="torch", skip_tokenizer_init=True) as fresh:
        llm = fresh
        show(step="fresh engine of the second checkpoint", same=ask() == others)


if __name__ == "__main__":
    main()
