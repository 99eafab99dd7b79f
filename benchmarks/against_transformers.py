"""FastDeploy beside Hugging Face transformers: same model, threads, dtype, prompts and lengths.

    python benchmarks/against_transformers.py                       # models/ernie-tiny, float32
    python benchmarks/against_transformers.py --model DIR --requests 32 --rounds 5

Each round runs, one after another in one process: FastDeploy on all requests at once; transformers
`generate` request by request; transformers `generate` on one left-padded batch (which must run to
the longest answer). Greedy, fixed answer lengths. Figures are medians over rounds of useful tokens
per second, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from pathlib import Path

from figures import add_json_option, print_figures

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "models" / "ernie-tiny"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    return parser.parse_args()


def workload(requests: int, seed: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt ids, answer length) pairs: prompts of 16 to 256 tokens, answers of 16 to 128."""
    generator = random.Random(seed)
    return [
        (
            [generator.randrange(10, vocab_size) for _ in range(generator.randint(16, 256))],
            generator.randint(16, 128),
        )
        for _ in range(requests)
    ]


def main() -> None:
    """Run and print the table."""
    options = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    import transformers

    from fastdeploy import LLM, SamplingParams

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32
    ).eval()
    work = workload(options.requests, options.seed, peer.config.vocab_size)
    useful = sum(length for _, length in work)
    llm = LLM(
        options.model,
        device="cpu",
        tensor_library="torch",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=options.requests,
        enable_prefix_caching=False,
        num_threads=options.threads,
    )
    parameters = [
        SamplingParams(
            temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
        )
        for _, n in work
    ]

    def ours() -> None:
        outputs = llm.generate([p for p, _ in work], parameters, use_tqdm=False)
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == useful

    def generate(ids: torch.Tensor, mask: torch.Tensor, length: int) -> None:
        out = peer.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + length

    def one_by_one() -> None:
        for prompt, length in work:
            ids = torch.tensor([prompt])
            generate(ids, torch.ones_like(ids), length)

    def padded() -> None:
        width = max(len(p) for p, _ in work)
        ids = torch.zeros(len(work), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(work):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        generate(ids, mask, max(n for _, n in work))

    runs = {
        "fastdeploy": ours,
        "transformers, one by one": one_by_one,
        "transformers, padded batch": padded,
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        ours()  # warm up each side once
        padded()
        for _ in range(options.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    llm.close()
    report(options, useful, seconds)


def report(options: argparse.Namespace, useful: int, seconds: dict[str, list[float]]) -> None:
    """Print conditions, medians with their spread, and ratios within rounds."""
    import torch
    import transformers

    print(
        f"model {Path(options.model).name}, float32, {options.threads} threads, {options.requests} "
        f"requests, {useful} answer tokens, {options.rounds} rounds\n"
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}\n"
    )
    print(f"{'':28} {'tokens/s':>10} {'min':>9} {'max':>9}   fastdeploy is")
    for name, values in seconds.items():
        rates = [useful / s for s in values]
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(values, seconds["fastdeploy"], strict=True)
        )
        tail = "" if name == "fastdeploy" else f"{ratio:8.2f} times as fast"
        print(
            f"{name:28} {statistics.median(rates):10.1f} {min(rates):9.1f} {max(rates):9.1f}   "
            f"{tail}"
        )
    print_figures(
        options, {f"{name}, tokens/s": [useful / s for s in v] for name, v in seconds.items()}
    )


if __name__ == "__main__":
    main()
