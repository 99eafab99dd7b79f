"""Where steps are captured nothing of drafts is computed operation by operation: prompts take turns
with them, for drafters that keep the host in the loop, too."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.worker import graph_sizes
from fastdeploy_core.worker.draft_batch import DraftBatches
from fastdeploy_core.worker.model_runner import ModelRunner
from tests.cpu.engine_mixes import Settings
from tests.cpu.speculative_mixes import (
    NO_REPEAT,
    SpeculativeBench,
    answers_alone,
    check,
    make_free_requests,
)
from tests.worker_steps import write_model

PROMPT_SIZES = (8, 32)


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_prompts_and_drafts_take_turns(
    method: str, tmp_path: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "target", with_tokenizer=True)
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_free_requests(Random(5), 12, plain.vocab_size)
    truth = answers_alone(plain, requests)
    monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most: PROMPT_SIZES)
    options = {} if method == "suffix" else {"model": str(folder)}
    # A processor keeps the host in the loop.
    bench = SpeculativeBench(
        folder, tensor_library, method, options, captures=True, processors=(NO_REPEAT,)
    )
    facts = bench.worker._runner.facts()
    assert facts["captures_drafts"] and not facts["captures_drafting"]
    uncaptured, compute, make = [], ModelRunner._compute, DraftBatches.make

    def computing(self: ModelRunner, launched: Any) -> Any:
        uncaptured.append(("judged", int(launched.rows.num_drafts.sum())))
        return compute(self, launched)

    def making(self: DraftBatches, rows: Any, step: Any, *more: Any) -> Any:
        uncaptured.append(("made", int(step.captured is not None)))
        return make(self, rows, step, *more)

    monkeypatch.setattr(ModelRunner, "_compute", computing)
    monkeypatch.setattr(DraftBatches, "make", making)
    arrivals = [(3 * number, request) for number, request in enumerate(requests)]
    core, found = bench.run_varied(Settings(overlap=True, max_num_seqs=8), arrivals, None)
    check(found, requests, truth)
    assert core.stats().draft_tokens_total > 20
    assert ("judged", 0) in uncaptured, "there were prompts"
    assert not [what for what in uncaptured if what[1]]
