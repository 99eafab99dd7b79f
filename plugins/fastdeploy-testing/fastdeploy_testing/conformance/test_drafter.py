"""A drafter: its proposals never change an answer, and it keeps its contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.contracts.speculative import DrafterContext, HostDraftInput
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import FastDeployError
from fastdeploy_testing.generate import sampled_tokens

from .base import MEBIBYTE, OnDevice, option_value, resident_bytes

VOCAB, NUM_DRAFTS, MAX_TOKENS = 64, 4, 24
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.9}]
# Without a method, the answers are the same for every drafter.
_ANSWERS: dict[str, dict[str, Any]] = {}


class DrafterConformance(OnDevice):
    """Override `options` for settings that the method needs, and `model` for one that needs a
    certain kind of target. Tests of proposals apply to drafters on the host; a drafter on the
    device is tested by running it after a model."""

    kind = "speculative"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, request: pytest.FixtureRequest, tiny_model: Path) -> Path:
        """The target's folder: --fd-model, else a tiny random one."""
        return Path(request.config.getoption("--fd-model") or tiny_model)

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, fd_options: dict[str, str], model: Path) -> dict[str, Any]:
        """The method's own settings: --fd-option, values as JSON if possible; {model} stands for
        the target's folder."""
        return {
            key: option_value(text.replace("{model}", str(model)))
            for key, text in fd_options.items()
        }

    @pytest.fixture
    def drafter(self, driver: Any, device: Any, options: dict[str, Any]) -> Any:
        """A fresh instance that drafts on the host."""
        if driver.runs_on != "host":
            pytest.skip(f"it drafts on the {driver.runs_on}: judged end to end")
        return driver(_context(device, options))

    # -- proposals of host drafters ---------------------------------------------------------------

    def test_says_where_it_runs(self, driver: Any) -> None:
        assert driver.runs_on in ("host", "device")

    def test_proposals_stay_within_their_limits(self, drafter: Any) -> None:
        rows = [[1, 2, 3, 1, 2], [5] * 30, [7], list(range(40)), [9, 8, 9, 8, 9]]
        limits = [NUM_DRAFTS, 1, 0, 2, NUM_DRAFTS]
        for _ in range(3):
            proposals = drafter.propose(_batch(rows, limits))
            assert len(proposals) == len(rows)
            for proposal, limit in zip(proposals, limits, strict=True):
                assert len(proposal) <= limit
                assert all(isinstance(t, int) and 0 <= t < VOCAB for t in proposal)
            rows = [[*row, row[0]] for row in rows]

    def test_empty_batch(self, drafter: Any) -> None:
        assert drafter.propose(_batch([], [])) == []

    def test_histories_are_left_alone(self, drafter: Any) -> None:
        tokens = np.array([1, 2, 3, 1, 2, 3, 1], dtype=np.int32)
        tokens.flags.writeable = False
        drafter.propose(HostDraftInput([0], [tokens], [NUM_DRAFTS], [[]]))
        assert tokens.tolist() == [1, 2, 3, 1, 2, 3, 1]

    def test_same_state_gives_the_same_proposal(
        self, driver: Any, device: Any, options: dict[str, Any], drafter: Any
    ) -> None:
        rows = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 9, 8]]
        other = driver(_context(device, options))
        assert drafter.propose(_batch(rows, [4, 4])) == other.propose(_batch(rows, [4, 4]))

    def test_histories_may_grow_by_any_number_of_tokens(
        self, driver: Any, device: Any, options: dict[str, Any], drafter: Any
    ) -> None:
        """With calls after every token or only now and then: the same length limits and no
        failure."""
        rng = np.random.default_rng(5)
        tokens = rng.integers(0, 6, 150).tolist()
        for end in np.cumsum(rng.integers(1, 9, 30)).tolist():
            (proposal,) = drafter.propose(_batch([tokens[:end]], [NUM_DRAFTS]))
            assert len(proposal) <= NUM_DRAFTS

    def test_observe_and_forget_take_what_the_engine_sends(self, drafter: Any) -> None:
        drafter.propose(_batch([[1, 2, 3, 1, 2]], [4]))
        for accepted in range(3):
            drafter.observe(0, [3, 1], accepted)
        drafter.forget(0)
        drafter.forget(0)
        drafter.forget(12345)
        assert len(drafter.propose(_batch([[1, 2, 3, 1, 2]], [4]))) == 1

    def test_a_forgotten_sequence_may_come_back_as_another(
        self, driver: Any, device: Any, options: dict[str, Any], drafter: Any
    ) -> None:
        """The same history gives the same drafts, whatever sequence had its number before."""
        drafter.propose(_batch([[1, 2, 3, 1, 2, 3] * 5], [4]))
        drafter.forget(0)
        history = _batch([[60, 61, 60, 61, 60]], [4])
        (proposal,), (expected,) = (
            one.propose(history) for one in (drafter, driver(_context(device, options)))
        )
        assert len(proposal) <= 4
        assert proposal == expected, "what a forgotten sequence held is still known"

    def test_memory_does_not_grow_with_forgotten_sequences(self, drafter: Any) -> None:
        rng = np.random.default_rng(3)

        def live(first: int) -> None:
            for seq_id in range(first, first + 100):
                row = rng.integers(0, VOCAB, 400).astype(np.int32)
                for end in (100, 300, 400):
                    drafter.propose(HostDraftInput([seq_id], [row[:end]], [4], [[]]))
                drafter.forget(seq_id)

        for first in range(0, 500, 100):  # more than a bounded memory may hold
            live(first)
        before = resident_bytes()
        for first in range(500, 1500, 100):
            live(first)
        assert resident_bytes() - before < 24 * MEBIBYTE

    # -- end to end, wherever it runs --------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, device: Any, model: Path) -> dict[str, Any]:
        """What all runs of the model share."""
        return {
            "device": device.name,
            "tensor_library": device.xp.name,
            "dtype": "float32" if "float32" in device.limits.dtypes else device.limits.dtypes[0],
            "max_model_len": 512,
        }

    @pytest.fixture(scope="class")
    @classmethod
    def without(cls, engine: dict[str, Any], model: Path) -> list[dict[str, Any]]:
        """Answers without the method, for each of SAMPLINGS."""
        key = json.dumps([str(model), engine], sort_keys=True)
        if key not in _ANSWERS:
            _ANSWERS[key] = sampled_tokens(
                model, prompts(), SAMPLINGS, max_tokens=MAX_TOKENS, **engine
            )
        return _ANSWERS[key]["runs"]

    @pytest.fixture(scope="class")
    @classmethod
    def found(
        cls, fd_entry: Any, engine: dict[str, Any], model: Path, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Answers with the method, and the engine's counters."""
        return sampled_tokens(
            model,
            prompts(),
            SAMPLINGS,
            max_tokens=MAX_TOKENS,
            speculative_config=_speculative(fd_entry.name, options),
            **engine,
        )

    @pytest.mark.parametrize("place", range(2), ids=["greedy", "sampled"])
    def test_answers_are_those_without_it(
        self, device: Any, without: list[dict[str, Any]], found: dict[str, Any], place: int
    ) -> None:
        if "float32" not in device.limits.dtypes:
            pytest.skip("float32 is not among limits.dtypes; tokens of other dtypes may differ")
        for way in ("together", "alone"):
            assert found["runs"][place][way] == without[place][way]

    def test_the_core_rejects_none_of_its_proposals(self, found: dict[str, Any]) -> None:
        """Right shapes, types and ids, and no exception: anything else counts as a failure."""
        assert found["metrics"]["draft_failures_total"] == 0

    def test_it_drafts(self, found: dict[str, Any]) -> None:
        metrics = found["metrics"]
        assert metrics["draft_tokens_total"] > 0, "no draft for prompts that repeat themselves"
        assert metrics["accepted_draft_tokens_total"] <= metrics["draft_tokens_total"]

    @pytest.mark.capability("max_tensor_parallel_size")
    def test_two_ranks_give_the_same_answers(
        self,
        fd_entry: Any,
        device: Any,
        engine: dict[str, Any],
        model: Path,
        options: dict[str, Any],
        without: list[dict[str, Any]],
    ) -> None:
        if device.limits.max_tensor_parallel_size < 2 or "float32" not in device.limits.dtypes:
            pytest.skip("limits.max_tensor_parallel_size is 1, or float32 is not declared")
        result = sampled_tokens(
            model,
            prompts()[:4],
            SAMPLINGS[:1],
            max_tokens=MAX_TOKENS,
            speculative_config=_speculative(fd_entry.name, options),
            tensor_parallel_size=2,
            **engine,
        )
        assert result["runs"][0]["together"] == without[0]["together"][:4]
        assert result["metrics"]["draft_failures_total"] == 0

    def test_unknown_settings_stop_the_start(
        self, fd_entry: Any, engine: dict[str, Any], model: Path, options: dict[str, Any]
    ) -> None:
        wrong = _speculative(fd_entry.name, {**options, "no_such_setting": 1})
        config = build_engine_config({"model": str(model), "speculative_config": wrong, **engine})
        with pytest.raises(FastDeployError, match="no_such_setting"):
            resolve_plugins(config)


def prompts() -> list[list[int]]:
    """Repetitive ones, random ones, one token, and lengths around a block."""
    rng = np.random.default_rng(7)
    period = rng.integers(3, 60, 9).tolist()
    found = [period * 4, [5, 6] * 8, *(rng.integers(3, 60, n).tolist() for n in (1, 5, 63, 64, 65))]
    return [*found, [*found[-1][:64], 9, 4]]


def _speculative(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": name,
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive_length": False,
        **options,
    }


def _context(device: Any, options: dict[str, Any]) -> DrafterContext:
    return DrafterContext(
        num_speculative_tokens=NUM_DRAFTS,
        options=options,
        vocab_size=VOCAB,
        max_num_seqs=8,
        max_model_len=512,
        device=device,
    )


def _batch(rows: list[list[int]], limits: list[int]) -> HostDraftInput:
    """Rows with ids 0, 1, ..."""
    return HostDraftInput(
        seq_ids=list(range(len(rows))),
        token_ids=[np.array(row, dtype=np.int32) for row in rows],
        max_drafts=limits,
        drafts=[[] for _ in rows],
    )


class TestDrafter(DrafterConformance):
    """Run by `fastdeploy plugins check`."""
