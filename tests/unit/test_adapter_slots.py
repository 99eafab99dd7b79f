"""Which requests the batch scheduler starts when there are more LoRA adapters than slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdeploy_core.scheduler.admission import ADAPTER_PATIENCE_S
from fastdeploy_core.scheduler.batch import BatchScheduler
from fastdeploy_core.types import ModelRunnerOutput, SequenceExtras
from tests.null_engine import make_core, make_request


class Played:
    """A scheduler with two slots whose steps all succeed, one token a row; its own clock."""

    def __init__(self) -> None:
        core = make_core(max_num_seqs=4, max_num_batched_tokens=64, overlap=False)
        settings = replace(core.scheduler.settings, max_adapters=2)
        self.now = 0.0
        self.scheduler = BatchScheduler(settings, core.scheduler.kv, lambda: self.now)
        self.started: list[str] = []
        self._number = 0

    def add(self, adapter: str, max_tokens: int) -> None:
        self._number += 1
        prompt = [4 + self._number, 5, 6]
        request = make_request(f"{adapter}{self._number}", prompt, max_tokens=max_tokens)
        if adapter:
            request.extras = SequenceExtras(adapter=adapter)
        self.scheduler.add(request)

    def step(self) -> None:
        """One step; never with more than two adapters."""
        step = self.scheduler.schedule()
        assert step is not None
        seqs = step.seqs()
        assert len({seq.table.scope[1] for seq in seqs} - {""}) <= 2
        self.started += [new.extras.adapter if new.extras else "" for new in
                         step.output.new_sequences]  # fmt: skip
        tokens = np.full(step.num_rows, 9, dtype=np.int64)
        output = ModelRunnerOutput(step_id=step.output.step_id, token_ids=tokens)
        self.scheduler.update(step, output)
        self.scheduler.take_deltas()


def test_others_pass_what_finds_no_slot() -> None:
    played = Played()
    for adapter, tokens in (("a", 9), ("b", 9), ("c", 1), ("a", 1), ("", 1)):
        played.add(adapter, tokens)
    played.step()
    assert played.started == ["a", "b", "a", ""]
    for _ in range(8):
        played.step()
    assert played.started == ["a", "b", "a", ""]
    played.step()  # both others have ended
    assert played.started == ["a", "b", "a", "", "c"]


def test_what_waited_long_is_not_passed_by_what_has_a_slot() -> None:
    played = Played()
    for adapter in ("a", "b", "c"):
        played.add(adapter, 3 if adapter != "c" else 1)
    played.step()
    played.now = ADAPTER_PATIENCE_S + 1
    for adapter in ("a", "b", ""):
        played.add(adapter, 5)
    played.step()
    assert played.started == ["a", "b", ""]  # who needs no slot takes none away
    played.step()
    played.step()
    assert played.started[:4] == ["a", "b", "", "c"]
    assert set(played.started[4:]) == {"a"}  # the other slot is free at once
