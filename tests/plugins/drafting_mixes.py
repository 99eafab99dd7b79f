"""Engines with a drafter that has layers of its own: random request mixes, the demo's tasks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.config import GraphConfig
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.types import Request
from fastdeploy_testing.capturing import OnCapturingDevice
from tests.cpu import engine_mixes
from tests.cpu.engine_mixes import Settings, SharedExecutor, make_requests

DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
TINY_VOCAB, MAX_TOKENS = 67, 160
COMMON = {
    "device": "cpu",  # the reference, whatever else is installed
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,  # threads cost more than they give on matrices this small
}


class Bench(engine_mixes.Bench):
    """One loaded model and drafter for engines with many settings. `graphs`: decode steps and
    rounds of drafts are captured, on a processor that re-runs what was captured."""

    def __init__(
        self, folder: Path, library: str, graphs: GraphConfig | None = None, **speculative: Any
    ) -> None:
        config = build_engine_config(
            {
                "model": str(folder),
                "device": "cpu",
                "tensor_library": library,
                "dtype": "float32",
                "max_model_len": MAX_TOKENS,
                "block_size": 4,
                "max_num_seqs": engine_mixes.MAX_NUM_SEQS,
                "max_num_batched_tokens": MAX_TOKENS,
                "num_gpu_blocks_override": 160,
                "speculative_config": speculative or None,
            }
        )
        self.config = replace(config, device=replace(config.device, num_threads=1))
        shapes = read_shapes(config.model.hf_config, 1)
        moe = [shapes.moe] if shapes.moe is not None else []
        self._resolved = resolve(self.config, layers=shapes.layers, moe=moe)
        if graphs is not None:
            self.config = replace(self.config, graphs=graphs)
            self._resolved = OnCapturingDevice(self._resolved)
        self._executor = SharedExecutor(self.config, self._resolved)
        self.block_bytes = self._executor._info.bytes_per_block
        self._num_seq_ids = 0


@cache
def prompts(task: str, count: int) -> list[list[int]]:
    """Held-out questions of the demo model's own curriculum, as token ids."""
    from tokenizers import Tokenizer

    folder = str(DEMO / "training")
    sys.path.insert(0, folder)
    try:
        import chat
        import curriculum
    finally:
        sys.path.remove(folder)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [chat.prompt_text(sample) for sample in curriculum.held_out(task, count, 2026)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def mixed(random: Random, count: int, demo: bool) -> list[Request]:
    """Requests of random kinds over the demo's tasks, or over random tokens."""
    requests = make_requests(random, count)
    for request in requests:
        if demo:
            task = random.choice(["arithmetic", "copying", "sorting", "facts", "recall"])
            text = random.choice(prompts(task, 6))
            request.prompt_token_ids = text[-100:] if random.random() < 0.8 else text[:90]
            request.eos_token_ids = [2, 4]
        else:
            request.prompt_token_ids = [t % TINY_VOCAB for t in request.prompt_token_ids]
    return requests


def stretched(random: Random, settings: Settings) -> Settings:
    """For longer texts than the mixes' own: pools that hold two or three of them, or all."""
    num_tokens = settings.max_num_batched_tokens if settings.chunked_prefill else MAX_TOKENS
    return replace(
        settings, num_blocks=random.choice([60, 90, 160]), max_num_batched_tokens=num_tokens
    )


def run_mix(benches: Any, name: str, seed: int) -> None:
    random = Random(seed)
    drafting, plain = benches(name)
    requests = mixed(random, 8, name.startswith("demo"))
    arrivals = [(random.randrange(12), request) for request in requests]
    settings = stretched(random, Settings.random(random))
    one_by_one = Settings(num_blocks=160, max_num_batched_tokens=MAX_TOKENS)
    _, expected = plain.run(one_by_one, arrivals)
    core, answers = drafting.run(settings, arrivals)
    assert answers.tokens == expected.tokens, (name, seed, settings)
    assert answers.reasons == expected.reasons and not answers.errors
    assert core.stats().draft_tokens_total > 0


def answers(llm: LLM, tasks: dict[str, int]) -> tuple[list[list[int]], int, int]:
    """Greedy answers to held-out questions; drafts fed and accepted meanwhile."""
    before = llm.get_metrics()
    texts = [{"prompt_token_ids": p} for task, n in tasks.items() for p in prompts(task, n)]
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    after = llm.get_metrics()
    drafted, accepted = (
        after[key] - before[key] for key in ("draft_tokens_total", "accepted_draft_tokens_total")
    )
    return [list(o.outputs[0].token_ids) for o in outputs], drafted, accepted
