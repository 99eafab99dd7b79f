"""`fastdeploy bench throughput` and `bench latency`: an engine in this process, no server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_core.cli.parsing import parse_table, whole
from fastdeploy_core.errors import ConfigError

from .command import add_dataset_arguments
from .data import BenchPrompt, load_prompts
from .other_names import add_options_without_effect
from .report import save, show, spread


def run_throughput(argv: Sequence[str]) -> int:
    """All prompts at once; tokens and requests per second."""
    values, own = parse_table(
        argv,
        "fastdeploy bench throughput",
        "Generate for many prompts at once and report tokens per second.",
        ("engine",),
        _throughput_arguments,
    )
    with _load(values) as llm:
        prompts = load_prompts(own, _vocab_size(llm))
        inputs, params = _inputs(llm, prompts, own)
        warm = min(own.num_warmup, len(inputs))
        if warm:
            llm.generate(inputs[:warm], params[:warm], use_tqdm=False)
        before = llm.get_metrics()
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=not own.no_progress)
        elapsed = time.perf_counter() - started
        after = llm.get_metrics()
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    result = {
        "num_prompts": len(outputs),
        "duration_s": round(elapsed, 3),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(outputs) / elapsed,
        "prompt_tokens_per_s": num_prompt / elapsed,
        "output_tokens_per_s": num_output / elapsed,
        "total_tokens_per_s": (num_prompt + num_output) / elapsed,
        **_step_numbers(before, after, elapsed),
    }
    show("throughput", result)
    save(own.save_result, result)
    return 0


def run_latency(argv: Sequence[str]) -> int:
    """One batch several times; seconds per batch."""
    values, own = parse_table(
        argv,
        "fastdeploy bench latency",
        "Generate for one batch repeatedly and report how long it takes.",
        ("engine",),
        _latency_arguments,
    )
    with _load(values) as llm:
        prompts = load_prompts(own, _vocab_size(llm))
        inputs, params = _inputs(llm, prompts, own)
        seconds = []
        for number in range(own.num_warmup + own.num_iterations):
            started = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            if number >= own.num_warmup:
                seconds.append(time.perf_counter() - started)
    longest = max(prompt.output_len for prompt in prompts)
    per_token = [value / longest for value in seconds]
    result = {
        "batch_size": own.num_prompts,
        "iterations": own.num_iterations,
        **spread("batch", seconds),
        **spread("output_token", per_token),
    }
    show("latency", result)
    save(own.save_result, result)
    return 0


def _throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser, 100)
    _sampling_arguments(parser)
    parser.add_argument(
        "--num-warmup", type=whole(0), default=2, metavar="N", help="prompts run before"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _latency_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser, 8, "--batch-size")
    _sampling_arguments(parser)
    parser.add_argument(
        *("--num-warmup", "--num-iters-warmup"),
        type=whole(0),
        default=1,
        metavar="N",
        help="batches run before",
    )
    parser.add_argument("--num-iterations", "--num-iters", type=whole(1), default=5, metavar="N")


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, help="default: 0; 1 with several answers")
    parser.add_argument("--n", type=whole(1), default=1, metavar="N", help="answers of a prompt")
    add_options_without_effect(parser, is_offline=True)


def _load(values: Mapping[str, Any]) -> Any:
    from fastdeploy import LLM
    from fastdeploy_core.cli.logs import setup_logging

    setup_logging("warning")
    if not values.get("model"):
        raise ConfigError("no model given; name a folder: `fastdeploy bench ... DIR`")
    return LLM(**values)


def _vocab_size(llm: Any) -> int:
    """Ids that have a text and that the model knows; its special tokens are mostly at the end."""
    tokenizer = llm.get_tokenizer()
    specials = [t for t in tokenizer.special_token_ids if t >= tokenizer.vocab_size // 2]
    size: int = min([tokenizer.vocab_size, *specials])
    return min(size, int(llm.config.model.hf_config.get("vocab_size", size)))


def _inputs(
    llm: Any, prompts: Sequence[BenchPrompt], own: argparse.Namespace
) -> tuple[list[Any], list[Any]]:
    """Prompts in the offline API's forms, and parameters that generate exactly the requested
    lengths."""
    from fastdeploy_core.types import SamplingParams

    inputs: list[Any] = []
    for prompt in prompts:
        if prompt.messages is not None:
            inputs.append(llm.get_tokenizer().apply_chat_template(prompt.messages))
        else:
            inputs.append(prompt.text if prompt.text is not None else prompt.token_ids)
    temperature = float(own.n > 1) if own.temperature is None else own.temperature
    params = [
        SamplingParams(
            n=own.n, temperature=temperature, max_tokens=prompt.output_len, ignore_eos=True
        )
        for prompt in prompts
    ]
    return inputs, params


def _step_numbers(
    before: Mapping[str, Any], after: Mapping[str, Any], elapsed: float
) -> dict[str, float]:
    """Steps, and the share of time that was not spent in the model."""
    names = ("steps_total", "model_s", "schedule_s", "draft_s", *_DRAFT_COUNTERS)
    change = {name: after[name] - before[name] for name in names}
    steps = max(1, change["steps_total"])
    return {
        **_draft_numbers(change, before, after, steps),
        "steps": change["steps_total"],
        "mean_step_ms": elapsed / steps * 1000,
        "mean_model_ms": change["model_s"] / steps * 1000,
        "mean_schedule_ms": change["schedule_s"] / steps * 1000,
        "mean_outside_model_ms": max(0.0, elapsed - change["model_s"]) / steps * 1000,
    }


_DRAFT_COUNTERS = ("drafts_total", "draft_tokens_total", "accepted_draft_tokens_total")


def _draft_numbers(
    change: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], steps: int
) -> dict[str, float]:
    """Statistics of drafts; empty without drafts."""
    drafts = change["drafts_total"]
    if not drafts:
        return {}
    at = list(after["accepted_drafts_at_total"])
    for place, count in enumerate(before["accepted_drafts_at_total"]):
        at[place] -= count
    accepted = change["accepted_draft_tokens_total"]
    return {
        "draft_tokens": change["draft_tokens_total"],
        "accepted_draft_tokens": accepted,
        "draft_acceptance": accepted / max(1, change["draft_tokens_total"]),
        "tokens_per_drafted_row": 1 + accepted / drafts,
        **{f"acceptance_at_{place}": count / drafts for place, count in enumerate(at)},
        "mean_draft_ms": change["draft_s"] / steps * 1000,
    }
