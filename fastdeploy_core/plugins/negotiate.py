"""Asks hooks and compares their answers: candidates with Accept or Decline, one winner, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.errors import PluginError

from .discovery import Inventory
from .drivers import broken, features
from .known import providers
from .manager import HookManager

ASKED: Final = "asked for by name"  # Decision.why of one that was not negotiated


class CandidateRow(msgspec.Struct, frozen=True):
    """One line of a decision's table."""

    name: str
    distribution: str
    accepted: bool
    score: int
    reason: str


class Decision(msgspec.Struct, frozen=True):
    """Why one kind got its driver. `winner` is empty if nothing could be chosen."""

    kind: str
    question: str
    winner: str
    why: str
    candidates: list[CandidateRow] = []


def decide(
    kind: str,
    question: str,
    candidates: Sequence[tuple[Candidate, str]],
    *,
    asked: str = "",
    origin: Callable[[str], str] = lambda name: "",
) -> Decision:
    """Choose a winner among (candidate, distribution) pairs. `asked` is an explicit name, which
    wins unless it declines. Ties go to the name that sorts first."""
    rows = [
        CandidateRow(
            name=c.name,
            distribution=distribution,
            accepted=isinstance(c.verdict, Accept),
            score=c.verdict.score if isinstance(c.verdict, Accept) else 0,
            reason=c.verdict.note if isinstance(c.verdict, Accept) else c.verdict.reason,
        )
        for c, distribution in candidates
    ]
    rows.sort(key=lambda r: (not r.accepted, -r.score, r.name))
    accepted = [r for r in rows if r.accepted]
    if asked:
        answer = next((r for r in rows if r.name == asked), None)
        if answer is None:
            row = CandidateRow(asked, origin(asked), True, 0, "asked for by name, gave no answer")
            return Decision(kind, question, asked, ASKED, [row, *rows])
        if not answer.accepted:
            return Decision(kind, question, "", f"{asked} declines: {answer.reason}", rows)
        return Decision(kind, question, asked, ASKED, rows)
    if not accepted:
        why = "no candidate accepts" if rows else "none is installed"
        known = [] if rows else [f"{n} by pip install {d}" for n, d in providers(kind).items()]
        why += f"; possible: {', '.join(known)}" if known else ""
        return Decision(kind, question, "", why, rows)
    best = accepted[0]
    others = len(accepted) - 1
    why = f"score {best.score}" + (f", {best.reason}" if best.reason else "")
    why += f"; best of {len(accepted)}" if others else "; the only one that accepts"
    return Decision(kind, question, best.name, why, rows)


def ask_candidates(
    hooks: HookManager, inventory: Inventory, kind: str, hook: str, question: Any, asked: str = ""
) -> tuple[Decision, list[Candidate]]:
    """Ask one question of every plugin and decide. A plugin answers for its own drivers only.

    A driver whose `features` do not cover what the question's layer needs is declined here and not
    asked about: it was perhaps written before that kind of layer was known.
    """
    found: list[tuple[Candidate, str]] = []
    short = _without_features(inventory, kind, question)
    origin_of = {entry.name: entry.distribution for entry in inventory.of(kind)}
    able = {origin for name, origin in origin_of.items() if name not in short}
    unasked = set(origin_of.values()) - able
    found += [(Candidate(name, Decline(reason)), origin_of[name]) for name, reason in short.items()]
    for answer in hooks.ask(hook, unasked=unasked, question=question):
        values = answer.value if isinstance(answer.value, list | tuple) else [answer.value]
        for value in values:
            if not isinstance(value, Candidate):
                hooks.complain(answer.plugin, hook, f"returned {value!r:.80}, not a Candidate")
                continue
            entries = inventory.named(kind, value.name)
            own = [e for e in entries if e.distribution == answer.plugin.distribution]
            if not own:
                hooks.complain(
                    answer.plugin, hook, f"answered for {kind} {value.name!r}, which is not its own"
                )
                continue
            if value.name in short:
                continue
            if own[0].reason:
                value = Candidate(value.name, Decline(own[0].reason))
            found.append((value, answer.plugin.distribution))
    decision = decide(
        kind, repr(question), found, asked=asked, origin=lambda name: origin_of.get(name, "")
    )
    return decision, [c for c, _ in found]


def _without_features(inventory: Inventory, kind: str, question: Any) -> dict[str, str]:
    """Drivers of that kind that do not declare what the question's layer needs, with the reason."""
    needs: frozenset[str] = getattr(getattr(question, "spec", None), "needs", frozenset())
    short, entries = {}, inventory.of(kind) if needs else ()
    broken([entry for entry in entries if not entry.is_core])  # one child for all of them
    for entry in entries:
        try:
            missing = needs - features(entry)
        except PluginError as error:
            short[entry.name] = str(error)
            continue
        if missing:
            short[entry.name] = f"does not declare {', '.join(sorted(missing))} among its features"
    return short


def ask_layer_drivers(
    hooks: HookManager,
    inventory: Inventory,
    kind: str,
    hook: str,
    questions: Sequence[Any],
    asked: str = "",
) -> Decision:
    """One driver of that kind for all layers that the questions are about."""
    decisions = [ask_candidates(hooks, inventory, kind, hook, q, asked)[0] for q in questions]
    return merge_decisions(decisions, asked)


def merge_decisions(decisions: Sequence[Decision], asked: str = "") -> Decision:
    """One driver for several questions of a kind: it must accept all of them; scores are added."""
    if len(decisions) == 1:
        return decisions[0]
    declined = [d for d in decisions if not d.winner]
    if declined:
        return declined[0]
    if asked:
        return decisions[0]
    totals: dict[str, list[CandidateRow]] = {}
    for decision in decisions:
        for row in decision.candidates:
            totals.setdefault(row.name, []).append(row)
    rows = []
    for name, answers in totals.items():
        refusals = [r.reason for r in answers if not r.accepted]
        complete = len(answers) == len(decisions)
        verdict: Accept | Decline = (
            Accept(sum(r.score for r in answers) // len(answers), answers[0].reason)
            if complete and not refusals
            else Decline("; ".join(refusals) or "gave no answer for one of the layer shapes")
        )
        rows.append((Candidate(name, verdict), answers[0].distribution))
    return decide(decisions[0].kind, " and ".join(d.question for d in decisions), rows)
