"""What this distribution answers at start-up. Imports no tensor library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts import Accept, Candidate, hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import StateQuestion

# Lower than a device's own driver.
_SCORE = 10


@hookimpl
def fd_state_backends(question: StateQuestion) -> list[Candidate]:
    """Plain tensor code runs on any device; its features say which kinds it has."""
    return [Candidate("plain", Accept(_SCORE, "plain tensor code"))]
