"""Acceptance "lossy_top_p": a draft passes when it is likely enough, not only when it is drawn.

FastDeploy's rule, for rows that draw at random: a draft among the target's `max_candidate_len`
likeliest tokens passes while top_p keeps it. The second likeliest passes, too, when each of the
next `verify_window` drafts is the likeliest at its place. The output then has another distribution
than the target's, which is why it has to be asked for by name.
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
        drawn: Tensor,
        drafts: Tensor,
        ranks: Tensor,
        filtered: Tensor,
        is_random: Tensor,
    ) -> Tensor:
        """[rows] int64: the draft where it passes, else the drawn token, so that the exact verifier
        behind sees it as drawn. ranks: of `draft_ranks`; filtered: [rows, vocabulary] logits, -inf
        outside what is kept; rows of a sequence stand one behind the other, its last one without a
        draft."""
        held = xp.gather(filtered, 1, xp.clamp(drafts, 0, None).unsqueeze(1)).squeeze(1)
        passes = (ranks < self.max_candidate_len) & (held > float("-inf"))
        best = (ranks == 0).to(xp.int64)
        total = xp.cumsum(best, -1)
        window, rows = self.verify_window, int(drafts.shape[0])
        if rows > window:
            # The row without a draft behind a sequence's last one is no best, so no window passes
            # it.
            inside = total[window:] - total[: rows - window] == window
            second = (ranks == 1)[: rows - window] & inside
            passes[: rows - window] = passes[: rows - window] | second
        return xp.where(passes & is_random, drafts, drawn)


def draft_ranks(xp: Any, logits: Tensor, drafts: Tensor) -> Tensor:
    """[rows] int64: how many tokens are likelier than the row's draft; NOWHERE where there is none,
    or where it is forbidden."""
    value = xp.gather(logits, 1, xp.clamp(drafts, 0, None).unsqueeze(1))
    ranks = (logits > value).to(xp.int64).sum(dim=-1)
    is_possible = (value.squeeze(1) > float("-inf")) & (drafts >= 0)
    nowhere = xp.full([1], NOWHERE, dtype=xp.int64, device=logits.device)
    return xp.where(is_possible, ranks, nowhere)
