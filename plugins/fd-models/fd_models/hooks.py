"""What this distribution answers at start-up. Imports no tensor library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionQuestion, StateQuestion

# Lower than a device's own driver.
_SCORE = 10


@hookimpl
def fd_state_backends(question: StateQuestion) -> list[Candidate]:
    """Plain tensor code runs on any device; its features say which kinds it has."""
    return [Candidate("plain", Accept(_SCORE, "plain tensor code"))]


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """For latent attention with an indexer alone."""
    reason = _why_not_indexed(question)
    answer = Decline(reason) if reason else Accept(_SCORE, "plain tensor code")
    return [Candidate("indexed", answer)]


def _why_not_indexed(question: AttentionQuestion) -> str:
    """Why driver `indexed` does not serve such layers; empty if it does."""
    spec = question.spec
    if spec.index is None or spec.kind != "mla":
        return "it has latent attention with an indexer alone"
    if spec.index.block != 1 or spec.index.format:
        return "it has indexers of single tokens, whose keys are in the model's dtype, alone"
    if question.kv_dtype not in ("auto", spec.dtype):
        return f"cache dtype {question.kv_dtype!r}; possible: auto"
    return ""
