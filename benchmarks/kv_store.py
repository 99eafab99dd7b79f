"""Seconds to the first token of a long prompt: computed, from a KV store, from the warm cache.

    python benchmarks/kv_store.py models/ernie-tiny --prompt-tokens 2000
    python benchmarks/kv_store.py MODEL --load-format dummy --dtype float32 --folder /var/tmp

Starts one engine without a store, and after each other two with fd-kv-disk on one new folder: the
first fills it, the second finds it. Each is asked for one token after `--prompts` random prompts;
medians are printed. Files that were just written are in the page cache, so the disk is not read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from figures import add_json_option, print_figures

from fastdeploy import LLM, SamplingParams


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--folder", default="", help="where the store's folder is made")
    add_json_option(parser)
    return parser.parse_args()


def ask(llm: LLM, prompts: list[list[int]], num_tokens: int = 1) -> tuple[list[float], int]:
    """(seconds of each answer, cached tokens of all prompts)."""
    sampling, seconds, cached = SamplingParams(max_tokens=num_tokens, temperature=0), [], 0
    for prompt in prompts:
        started = time.perf_counter()
        answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        seconds.append(time.perf_counter() - started)
        cached += answer.num_cached_tokens or 0
    return seconds, cached


def start(options: argparse.Namespace, **store: object) -> LLM:
    """An engine that has answered once."""
    llm = LLM(
        options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=options.prompt_tokens + 16,
        max_num_seqs=1,
        num_gpu_blocks_override=(options.prompt_tokens // 64 + 2) * (options.prompts + 1),
        **store,
    )
    ask(llm, [[7, 8, 9]], 2)
    return llm


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    rng, size = random.Random(0), options.prompt_tokens
    prompts = [[rng.randrange(5, 250) for _ in range(size)] for _ in range(options.prompts)]
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        store = {"kv_store": "disk", "kv_store_config": {"path": folder}}
        with start(options) as llm:
            figures["computed, no store, s"] = ask(llm, prompts)[0]
            figures["warm cache, no store, s"], cached = ask(llm, prompts)
        with start(options, **store) as llm:
            figures["computed, store being filled, s"] = ask(llm, prompts)[0]
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        figures["size of the folder, MiB"] = [sum(f.stat().st_size for f in files) / 2**20]
        with start(options, **store) as llm:
            figures["from the store, s"], found = ask(llm, prompts)
            figures["warm cache, with store, s"] = ask(llm, prompts)[0]
    if found < cached:
        sys.exit(f"only {found} of {cached} tokens came from the store")
    print(f"{len(files)} files, {found / len(prompts):.0f} of {size} tokens of a prompt cached")
    for name, values in figures.items():
        print(f"{name:32} {statistics.median(values):10.4f}")
    print_figures(options, figures)


if __name__ == "__main__":
    main()
