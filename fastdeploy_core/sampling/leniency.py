"""Acceptance "lossy_top_p": a draft also passes when it is likely enough, not only when it is
sampled.

FastDeploy's rule, for rows that sample at random: a draft among the target's `max_candidate_len`
likeliest tokens passes if top_p keeps it. The second likeliest also passes if each of the next
`verify_window` drafts is the likeliest token of its position. The output then has another
distribution than the target's, so users have to ask for it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

NOWHERE = 1 << 30


@dataclass(frozen=True, slots=True)
class Leniency:
    """The rule's two numbers."""

    max_candidate_len: int
    verify_window: int

    def choose(
        self,
        xp: Any,
        sampled: Tensor,
        drafts: Tensor,
        ranks: Tensor,
        filtered: Tensor,
        is_random: Tensor,
    ) -> Tensor:
        """[rows] int64: the draft where it passes, else the sampled token. The exact verifier,
        which runs next, then sees a passing draft as sampled. ranks: of `draft_ranks`; filtered:
        [rows, vocabulary] logits, -inf outside what is kept. Rows of a sequence are consecutive;
        the last one has no draft."""
        held = xp.gather(filtered, 1, xp.clamp(drafts, 0, None).unsqueeze(1)).squeeze(1)
        passes = (ranks < self.max_candidate_len) & (held > float("-inf"))
        best = (ranks == 0).to(xp.int64)
        total = xp.cumsum(best, -1)
        window, rows = self.verify_window, int(drafts.shape[0])
        if rows > window:
            # A sequence's last row has no draft and so never counts as best: no window crosses it.
            inside = total[window:] - total[: rows - window] == window
            second = (ranks == 1)[: rows - window] & inside
            passes[: rows - window] = passes[: rows - window] | second
        return xp.where(passes & is_random, drafts, sampled)


def draft_ranks(xp: Any, logits: Tensor, drafts: Tensor) -> Tensor:
    """[rows] int64: how many tokens are likelier than the row's draft; NOWHERE if the row has no
    draft or the draft is forbidden."""
    value = xp.gather(logits, 1, xp.clamp(drafts, 0, None).unsqueeze(1))
    ranks = (logits > value).to(xp.int64).sum(dim=-1)
    is_possible = (value.squeeze(1) > float("-inf")) & (drafts >= 0)
    nowhere = xp.full([1], NOWHERE, dtype=xp.int64, device=logits.device)
    return xp.where(is_possible, ranks, nowhere)
