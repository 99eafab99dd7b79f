"""Answers to start-up hooks for what serves every device. Imports no tensor library."""

from __future__ import annotations

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.moe import ExpertQuestion

_SCORE = 10  # lower than any device's own


@hookimpl
def fd_expert_communicators(question: ExpertQuestion) -> list[Candidate]:
    """Runs over any device's own collectives."""
    alone = Decline(f"serves one rank, there are {question.num_ranks}")
    return [
        Candidate("loopback", alone),
        Candidate("all_gather", Accept(_SCORE, "plain tensor code")),
    ]
