"""Random request mixes over a worker with a speculative method, beside the same worker without one.

The methods' drafts are spoilt at random, so that refusals are as frequent as hits whatever the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fd_grammar_llguidance.backend import LLGuidanceBackend

from fastdeploy_core.config import SpeculativeConfig
from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.contracts.speculative import DraftBatch, HostDraftInput
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.types import (
    Request,
    RequestOutputDelta,
    SamplingParams,
    StructuredOutputsParams,
    TokenDeltas,
    each_delta,
)
from fastdeploy_testing.capturing import WithPrompts
from tests.cpu.engine_mixes import (
    MAX_MODEL_LEN,
    Bench,
    Settings,
    SharedExecutor,
    block_bytes,
    play,
)
from tests.null_engine import Collector, make_request
from tests.worker_steps import EOS, engine_config, sharpen

NUM_DRAFTS = 4
NO_REPEAT = f"{__name__}:NoRepeat"


class NoRepeat:
    """Forbids the last three tokens generated: a processor whose rows differ from draft to
    draft."""

    def __init__(self, context: ProcessorContext) -> None:
        pass

    def validate(self, params: SamplingParams) -> None:
        return None

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> bool:
        return bool((params.logits_processors_args or {}).get("no_repeat"))

    def remove(self, seq_id: int) -> None:
        return None

    def apply(self, logits: Any, seq_ids: Sequence[int], output_token_ids: Any) -> Any:
        for row, output in enumerate(output_token_ids):
            for token in output[-3:]:
                logits[row : row + 1, int(token) : int(token) + 1] = float("-inf")
        return logits


class Oracle:
    """A host drafter that knows the answers, and tells some of them wrongly or in part."""

    name, contract, runs_on = "oracle", CONTRACT, "host"

    def __init__(self, random: Random, answers: list[list[int]], vocab_size: int) -> None:
        self._random, self._vocab_size = random, vocab_size
        self._answers = answers

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        proposals = []
        for tokens, limit in zip(batch.token_ids, batch.max_drafts, strict=True):
            known = tokens.tolist()
            truth = next((a for a in self._answers if a[: len(known)] == known), known)
            proposals.append(self._spoil(truth[len(known) : len(known) + limit]))
        return proposals

    def _spoil(self, drafts: list[int]) -> list[int]:
        random = self._random
        drafts = drafts[: random.randrange(len(drafts) + 1)] if random.random() < 0.3 else drafts
        wrong = [random.randrange(self._vocab_size) for _ in drafts]
        return [w if random.random() < 0.25 else d for d, w in zip(drafts, wrong, strict=True)]

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        assert 0 <= accepted <= len(drafted) > 0

    def forget(self, seq_id: int) -> None:
        return None


class SpoilsDevice:
    """Around a drafter on the device: every third draft is another one."""

    runs_on = "device"

    def __init__(self, inner: Any, xp: Any, vocab_size: int) -> None:
        self._inner, self._xp, self._vocab_size, self._num_steps = inner, xp, vocab_size, 0
        self.name = inner.name

    def propose(self, batch: DraftBatch) -> Any:
        drafts = self._inner.propose(batch)
        self._num_steps += 1
        places = np.arange(drafts.shape[0] * drafts.shape[1]) + self._num_steps
        change = (places % 3 == 0).astype(np.int64).reshape(tuple(drafts.shape))
        return (drafts + self._xp.from_numpy(change) * 7) % self._vocab_size

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        raise AssertionError("drafters on the device are not told")

    def forget(self, seq_id: int) -> None:
        self._inner.forget(seq_id)


class SpeculativeBench(Bench):
    """Bench over a model folder with a tokenizer; `method` None: without speculation."""

    def __init__(
        self,
        folder: Path,
        library: str,
        method: str | None = None,
        options: dict[str, Any] | None = None,
        *,
        sharp: bool = True,
        captures: bool = False,
        benchmark_mode: bool = False,
        processors: tuple[str, ...] = (NO_REPEAT,),
        load_format: str = "dummy",
    ) -> None:
        model = {"max_model_len": MAX_MODEL_LEN, "load_format": load_format}
        config = engine_config(folder, library, model=model, logits_processors=processors)
        if method is not None:
            speculative = SpeculativeConfig(
                method,
                NUM_DRAFTS,
                adaptive_length=False,
                benchmark_mode=benchmark_mode,
                options=options or {},
            )
            config = replace(config, speculative=speculative)
        self.config = config
        self._resolved: Any = resolve_plugins(self.config)
        if captures:
            self._resolved = WithPrompts(self._resolved)
        self._executor = SharedExecutor(self.config, self._resolved)
        self.block_bytes = block_bytes(self._executor._info)
        self._num_seq_ids = 0
        self._method = method
        if sharp:
            sharpen(self.worker)

    @property
    def speculation(self) -> Any:
        """The worker's part of it."""
        return self.worker._runner._drafting

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.worker._runner.vocab_size

    def run_varied(
        self, settings: Settings, arrivals: list[tuple[int, Request]], random: Random | None
    ) -> tuple[EngineCore, DetailCollector]:
        """Play with a number of drafts that changes from step to step at random."""
        core = self.engine(settings)
        policy = core.scheduler._policy
        if random is not None and policy is not None:
            policy.choose = lambda num_rows, kind: random.choice([0, 1, 2, NUM_DRAFTS, NUM_DRAFTS])
        collector = play(core, arrivals, DetailCollector())
        core.scheduler.check_idle()
        self._num_seq_ids = core.scheduler._next_seq_id
        return core, collector


class DetailCollector(Collector):
    """Keeps log-probabilities, too."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: dict[tuple[str, int], list[Any]] = {}

    def take(self, outputs: list[RequestOutputDelta | TokenDeltas]) -> None:
        outputs = list(each_delta(outputs))
        for delta in outputs:
            for seq in delta.sequences:
                kept = self.logprobs.setdefault((delta.request_id, seq.index), [])
                kept.extend(seq.logprobs or [])
        super().take(outputs)


def answers_alone(bench: SpeculativeBench, requests: list[Request]) -> DetailCollector:
    """Each request by itself, without speculation and with everything turned off."""
    everything = DetailCollector()
    for request in requests:
        core = bench.engine(Settings())
        play(core, [(0, request)], everything)
        bench._num_seq_ids = core.scheduler._next_seq_id
    return everything


def check(collector: DetailCollector, requests: list[Request], truth: DetailCollector) -> None:
    """Tokens, reasons and log-probabilities are those of each request alone."""
    for request in requests:
        name = request.request_id
        assert collector.errors.get(name) == truth.errors.get(name), name
        if name in truth.errors:
            continue
        assert collector.answers(name) == truth.answers(name), (name, request.sampling)
        assert collector.reasons[name] == truth.reasons[name], name
        for index in truth.tokens[name]:
            found, expected = (c.logprobs[name, index] for c in (collector, truth))
            assert [entry.token_ids[0] for entry in found] == [
                entry.token_ids[0] for entry in expected
            ]
            np.testing.assert_allclose(
                [entry.logprobs[0] for entry in found],
                [entry.logprobs[0] for entry in expected],
                atol=2e-4,
            )


def make_requests(random: Random, count: int, folder: Path, vocab_size: int) -> list[Request]:
    """Prompts with common beginnings and every feature that looks at logits or at text."""
    backend = LLGuidanceBackend(str(folder / "tokenizer.json"), vocab_size, [EOS])
    grammars = [
        backend.compile(StructuredOutputsParams(**constraint), {})
        for constraint in (
            {"regex": "[a-c]{4,40}"},
            {"choice": ["Beijing", "Paris, I think"]},
            {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
        )
    ]
    common = [random.randrange(5, vocab_size) for _ in range(30)]
    requests = []
    for index in range(count):
        prompt = common[: random.choice([0, 0, 4, 8, 9, 16])]
        prompt = prompt + [random.randrange(5, vocab_size) for _ in range(random.randrange(1, 14))]
        sampling: dict[str, Any] = {"ignore_eos": random.random() < 0.6}
        if index % 2:
            sampling |= {
                "temperature": random.choice([0.7, 1.0, 1.3]),
                "seed": random.randrange(1000),
                "n": random.choice([1, 1, 2, 3]),
                "top_k": random.choice([0, 0, 20]),
                "top_p": random.choice([1.0, 0.9]),
                "min_p": random.choice([0.0, 0.0, 0.05]),
            }
        for chance, feature in (
            (0.25, {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
            (0.2, {"logprobs": random.choice([0, 2])}),
            (0.15, {"logit_bias": dict.fromkeys(common[:3], 3.0)}),
            (0.2, {"bad_words_token_ids": [[t] for t in common[:2]] + [common[3:5], [7, 8, 9]]}),
            (0.2, {"min_tokens": random.randrange(1, 12)}),
            (0.15, {"stop_token_ids": [random.randrange(5, vocab_size) for _ in range(30)]}),
            (0.1, {"allowed_token_ids": sorted({*common, EOS, *range(40, 60)})}),
            (0.15, {"logits_processors_args": {"no_repeat": True}}),
            (0.1, {"thinking_token_budget": random.randrange(0, 9)}),
        ):
            if random.random() < chance:
                sampling |= feature
        if "thinking_token_budget" in sampling:
            prompt = [*prompt, 3]  # <think>
        grammar = None
        if random.random() < 0.25 and "thinking_token_budget" not in sampling:
            grammar = random.choice(grammars)
            sampling = {k: v for k, v in sampling.items() if k not in _NOT_WITH_GRAMMAR}
        most = random.randrange(sampling.get("min_tokens") or 1, 30)
        request = make_request(f"r{index}", prompt, max_tokens=most, **sampling)
        request.eos_token_ids = [EOS]
        if grammar is not None:
            request.grammar, request.grammar_backend = grammar, "llguidance"
        requests.append(request)
    return requests


def make_free_requests(random: Random, count: int, vocab_size: int) -> list[Request]:
    """Greedy and sampled ones that nothing constrains; they end at many places."""
    common = [random.randrange(5, vocab_size) for _ in range(30)]
    requests = []
    for index in range(count):
        prompt = common[: random.choice([0, 4, 8, 16])]
        prompt += [random.randrange(5, vocab_size) for _ in range(random.randrange(1, 14))]
        sampling: dict[str, Any] = {"ignore_eos": random.random() < 0.6}
        if index % 3 == 2:
            sampling |= {
                "temperature": random.choice([0.7, 1.0, 1.3]),
                "seed": random.randrange(1000),
                "top_k": random.choice([0, 0, 20]),
                "top_p": random.choice([1.0, 0.9]),
            }
        if random.random() < 0.3:
            stops = [random.randrange(5, vocab_size) for _ in range(30)]
            sampling["stop_token_ids"] = stops
        most = random.choice([random.randrange(1, 30), 30, 60])  # some up to the context's end
        request = make_request(f"f{index}", prompt, max_tokens=most, **sampling)
        request.eos_token_ids = [EOS]
        requests.append(request)
    return requests


# With these a grammar may leave no token at all, or one that the sampler must not take.
_NOT_WITH_GRAMMAR = ("allowed_token_ids", "bad_words_token_ids", "logits_processors_args")


def whole_texts(requests: list[Request], truth: DetailCollector) -> list[list[int]]:
    """Prompt and answer of every branch, for drafters that know too much."""
    return [
        [*request.prompt_token_ids, *answer]
        for request in requests
        for answer in truth.answers(request.request_id)
    ]
