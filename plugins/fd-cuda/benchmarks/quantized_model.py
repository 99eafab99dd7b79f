"""ERNIE-4.5-300B-A47B's shapes with 2-bit experts, random packed weights, on one GPU: whole greedy
steps through LLM.generate.

    python plugins/fd-cuda/benchmarks/quantized_model.py
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from fastdeploy import LLM, SamplingParams
from random_model import SHAPES


def main() -> int:
    """Milliseconds of a decode step, by the time of 25 tokens less that of one."""
    config, draw, batches = SHAPES["ernie-300b-a47b"], random.Random(0), (1, 8, 32)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        began = time.perf_counter()
        engine = LLM(
            folder, load_format="dummy", quantization="wint2", device="cuda",
            skip_tokenizer_init=True,
            max_model_len=2048, max_num_seqs=max(batches), graph_capture_sizes=list(batches),
            enable_prefix_caching=False,
        )  # fmt: skip
    with engine:
        print(
            f"\nernie-300b-a47b, wint2: ready after {time.perf_counter() - began:.1f} s", flush=True
        )

        def seconds(batch: int, length: int, num_tokens: int) -> float:
            prompts = [[draw.randrange(10, 1 << 16) for _ in range(length)] for _ in range(batch)]
            params = SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        for batch in batches:
            seconds(batch, 32, 3)
            first, whole = (
                statistics.median(seconds(batch, 32, n) for _ in range(3)) for n in (1, 25)
            )
            step = (whole - first) / 24
            print(
                f"  batch {batch}: {step * 1e3:.2f} ms a step, {batch / step:.0f} tokens/s",
                flush=True,
            )
        for length in (501, 1001):
            seconds(1, length, 1)
            taken = statistics.median(seconds(1, length, 1) for _ in range(3))
            print(f"  prompt of {length} tokens: {taken * 1e3:.1f} ms", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
