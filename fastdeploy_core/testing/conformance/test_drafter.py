"""A drafter: proposals within their limits, deterministic, and free of leftovers."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.contracts.speculative import DrafterContext, DraftInput

from .base import OnDevice

VOCAB, NUM_DRAFTS = 64, 4


class DrafterConformance(OnDevice):
    """Override `model` for a method that needs one, and `hidden_states` if it reads them."""

    kind = "speculative"

    @pytest.fixture
    def model(self) -> Any:
        """The target model, for methods that share weights with it."""
        return None

    @pytest.fixture
    def drafter_options(self, fd_options: dict[str, str]) -> dict[str, Any]:
        """The method's own settings."""
        return dict(fd_options)

    @pytest.fixture
    def drafter(self, driver: Any, device: Any, model: Any, drafter_options: dict[str, Any]) -> Any:
        """A fresh instance."""
        return driver(DrafterContext(NUM_DRAFTS, drafter_options, model, device, 8, VOCAB))

    def hidden_states(self, device: Any, num_rows: int) -> Any:
        """[num_rows, hidden] for methods that read them."""
        return None

    def batch(self, device: Any, rows: list[list[int]], drafts: list[int]) -> DraftInput:
        """Rows with ids 0, 1, ..."""
        return DraftInput(
            seq_ids=list(range(len(rows))),
            token_ids=rows,
            max_drafts=drafts,
            hidden_states=self.hidden_states(device, len(rows)),
        )

    def test_proposals_stay_within_their_limits(self, drafter: Any, device: Any) -> None:
        rows = [[1, 2, 3, 1, 2], [5] * 30, [7], list(range(40))]
        limits = [NUM_DRAFTS, 1, 0, 2]
        proposals = drafter.propose(self.batch(device, rows, limits))
        assert len(proposals) == len(rows)
        for proposal, limit in zip(proposals, limits, strict=True):
            assert len(proposal) <= limit
            assert all(isinstance(t, int) and 0 <= t < VOCAB for t in proposal)

    def test_empty_batch(self, drafter: Any, device: Any) -> None:
        assert drafter.propose(self.batch(device, [], [])) == []

    def test_same_state_gives_the_same_proposal(
        self, driver: Any, device: Any, model: Any, drafter_options: dict[str, Any]
    ) -> None:
        rows = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 9, 8]]
        results = []
        for _ in range(2):
            context = DrafterContext(NUM_DRAFTS, drafter_options, model, device, 8, VOCAB)
            results.append(driver(context).propose(self.batch(device, rows, [4, 4])))
        assert results[0] == results[1]

    def test_row_does_not_depend_on_its_company(self, drafter: Any, device: Any) -> None:
        rows = [[1, 2, 3, 1, 2, 3, 1], [9, 8, 9, 8, 9]]
        together = drafter.propose(self.batch(device, rows, [4, 4]))
        for seq_id in (0, 1):
            drafter.forget(seq_id)
        alone = drafter.propose(self.batch(device, rows[:1], [4]))
        assert together[0] == alone[0]

    def test_observe_and_forget_take_what_the_engine_sends(self, drafter: Any, device: Any) -> None:
        drafter.propose(self.batch(device, [[1, 2, 3, 1, 2]], [4]))
        for accepted in range(3):
            drafter.observe(0, [3, 1], accepted)
        drafter.observe(0, [], 0)
        drafter.forget(0)
        drafter.forget(0)
        drafter.forget(12345)
        again = drafter.propose(self.batch(device, [[1, 2, 3, 1, 2]], [4]))
        assert len(again) == 1


class TestDrafter(DrafterConformance):
    """Run by `fastdeploy plugins check`."""
