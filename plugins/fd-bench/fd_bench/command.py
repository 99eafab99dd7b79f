"""`fastdeploy bench throughput | latency | serve`: measure an engine in process, or a server."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from fastdeploy_core.cli.parsing import whole
from fastdeploy_core.errors import ConfigError

KINDS = {
    "throughput": ("offline", "run_throughput", "tokens per second of many prompts at once"),
    "latency": ("offline", "run_latency", "seconds of one batch, repeated"),
    "serve": ("serve", "run", "latencies of a running server at given request rates"),
    "eval": ("evaluation", "run", "tasks of lm-eval, with its own options"),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark."""
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<12} {summary}" for name, (_, _, summary) in KINDS.items())
        print(f"usage: fastdeploy bench KIND [arguments]\n\nkinds:\n{rows}")
        return 0 if argv else 2
    if argv[0] not in KINDS:
        raise ConfigError(f"unknown benchmark {argv[0]!r}; possible: {', '.join(KINDS)}")
    module, function, _ = KINDS[argv[0]]
    found = importlib.import_module(f"fd_bench.{module}")
    return int(getattr(found, function)(argv[1:]))


def add_dataset_arguments(
    parser: argparse.ArgumentParser, num_prompts: int, flag: str = "--num-prompts"
) -> None:
    """Options about prompts that all benchmarks share; `flag` says how many there are."""
    group = parser.add_argument_group("prompts")
    group.add_argument(flag, dest="num_prompts", type=whole(1), default=num_prompts, metavar="N")
    group.add_argument(
        *("--dataset", "--dataset-path"),
        metavar="FILE",
        help='JSONL with "prompt" or "messages" in each line, or ShareGPT\'s JSON; default: random '
        "token ids",
    )
    group.add_argument(
        *("--input-len", "--random-input-len"),
        type=whole(1),
        default=64,
        metavar="N",
        help="random prompt tokens",
    )
    group.add_argument(
        *("--prefix-len", "--random-prefix-len"),
        type=whole(0),
        default=0,
        metavar="N",
        help="tokens before them that are the same in all prompts",
    )
    group.add_argument(
        *("--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len"),
        type=whole(1),
        metavar="N",
        help="tokens to generate; default: as a file's line says, else 64",
    )
    group.add_argument(
        *("--range-ratio", "--random-range-ratio"),
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary by this share around the given ones (0 to 0.9)",
    )
    group.add_argument("--dataset-seed", type=int, default=0, metavar="N")
    group.add_argument(
        *("--save-result", "--output-json"),
        nargs="?",
        const="",
        metavar="FILE",
        help="also write the numbers as JSON; default: a new file in the current folder",
    )
