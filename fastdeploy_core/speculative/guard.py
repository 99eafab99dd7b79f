"""Survives drafters: one that fails, or proposes nonsense, costs its drafts; requests do not
notice."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from fastdeploy_core.contracts.speculative import NO_DRAFT, Drafter, HostDraftInput

logger = logging.getLogger(__name__)


class DrafterGuard:
    """Calls drafters, and counts what is lost with them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_failures = 0  # proposals lost to an exception or to nonsense

    def ask(
        self,
        drafter: Drafter,
        seq_ids: np.ndarray,
        histories: Sequence[np.ndarray],
        table: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        """Have a host drafter continue the rows of the table, [rows, k] int64 with NO_DRAFT after
        each row's last draft, up to `limits` drafts each. histories: all known tokens of each
        row."""
        before = (table != NO_DRAFT).sum(1)
        rows = np.flatnonzero(before < limits).tolist()
        if not rows:
            return
        begins, most = before[rows].tolist(), (limits - before)[rows].tolist()
        question = HostDraftInput(
            seq_ids=seq_ids[rows].tolist(),
            token_ids=[histories[row] for row in rows],
            max_drafts=most,
            drafts=[table[row, :n].tolist() for row, n in zip(rows, begins, strict=True)],
        )
        try:
            proposals = drafter.propose(question)
            if len(proposals) != len(rows):
                raise ValueError(f"propose() answered {len(proposals)} of {len(rows)} rows")
            for row, begin, limit, proposal in zip(rows, begins, most, proposals, strict=True):
                if not proposal:
                    continue
                if len(proposal) > limit:
                    raise ValueError(f"propose() made {len(proposal)} drafts of at most {limit}")
                valid = self._valid(drafter, proposal)
                table[row, begin : begin + len(valid)] = valid
        except Exception as error:
            self.count(drafter, error)

    def observe(self, drafter: Drafter, seq_id: int, drafted: list[int], accepted: int) -> None:
        """Tell how a proposal fared."""
        try:
            drafter.observe(seq_id, drafted, accepted)
        except Exception as error:
            self.count(drafter, error)

    def forget(self, drafter: Drafter, seq_id: int) -> None:
        """Tell that a sequence left."""
        try:
            drafter.forget(seq_id)
        except Exception as error:
            self.count(drafter, error)

    def check_taken(self, drafter: Drafter, drafts: np.ndarray) -> None:
        """Count it if the device has found what is no token among a drafter's proposals."""
        if np.count_nonzero(drafts < NO_DRAFT):
            self.count(drafter, self._no_token(int(drafts.min())))

    def count(self, drafter: Drafter, error: Exception) -> None:
        """Drafts are lost; the first time a warning says so."""
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning(
                "speculative method %s failed; its drafts are lost, requests go on. Further "
                "failures are only counted (fastdeploy:spec_decode_drafter_failures_total)",
                drafter.name,
                exc_info=error,
            )

    def _valid(self, drafter: Drafter, proposal: list[int]) -> list[int]:
        """Up to the first that is no token of the vocabulary, which counts as a failure."""
        if min(proposal) >= 0 and max(proposal) < self._vocab_size:
            return proposal
        wrong = next(n for n, token in enumerate(proposal) if not 0 <= token < self._vocab_size)
        if proposal[wrong] != NO_DRAFT:
            self.count(drafter, self._no_token(proposal[wrong]))
        return proposal[:wrong]

    def _no_token(self, token: int) -> ValueError:
        return ValueError(f"propose() returned token {token} of a vocabulary of {self._vocab_size}")
