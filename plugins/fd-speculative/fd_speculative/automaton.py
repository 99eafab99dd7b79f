"""A suffix automaton over many texts that grow side by side (Blumer et al. 1985).

Each state stands for a set of substrings with the same continuations. Adding a token costs constant
time on average; the state reached gives the longest ending that occurred before.
"""

from __future__ import annotations

ROOT = 0


class SuffixAutomaton:
    """Texts start at ROOT; the caller keeps the state at each text's end (its tip)."""

    __slots__ = ("_seen", "length", "link", "next")

    def __init__(self) -> None:
        self.length = [0]  # by state: length of its longest substring
        self.link = [-1]  # by state: the state of its longest ending with other continuations
        self.next: list[dict[int, int]] = [{}]
        self._seen: dict[int, dict[int, int]] = {}  # by state: how often each token followed

    def append(self, tip: int, token: int) -> tuple[int, int]:
        """Add a token to the text that ends in `tip`. Returns (the new tip, the state of the
        longest ending that occurred before; ROOT when there is none)."""
        known = self.next[tip].get(token)
        if known is not None:
            tip = self._exact(tip, known, token)
            return tip, tip
        new = self._state(self.length[tip] + 1, ROOT, {})
        state = tip
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._exact(state, self.next[state][token], token)
        return new, self.link[new]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Match one more token without adding it: (state, length) of the longest known ending."""
        while state > ROOT and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        target = self.next[state].get(token)
        return (ROOT, 0) if target is None else (target, length + 1)

    def count(self, state: int, token: int) -> None:
        """Count that `token` followed a text whose longest known ending was in `state`."""
        if len(self.next[state]) > 1:
            seen = self._seen.setdefault(state, {})
            seen[token] = seen.get(token, 0) + 1

    def draft(self, state: int, limit: int, least: float) -> list[int]:
        """The likeliest continuation, up to `limit` tokens, as long as its probability is at least
        `least`."""
        drafts: list[int] = []
        while state > ROOT and not self.next[state]:
            state = self.link[state]  # the state only occurred at ends of texts
        probability = 1.0
        while state > ROOT and len(drafts) < limit:
            ways = self.next[state]
            if not ways:
                break
            if len(ways) == 1:
                token = next(iter(ways))
            else:
                seen = self._seen.get(state, {})
                token = max(ways, key=lambda t: (seen.get(t, 0), t))
                total = sum(seen.values()) + len(ways)
                probability *= (seen.get(token, 0) + 1) / total
                if probability < least:
                    break
            drafts.append(token)
            state = ways[token]
        return drafts

    def _exact(self, state: int, target: int, token: int) -> int:
        """The state of exactly the longest substring of `state` followed by the token. If `target`
        also stands for longer substrings, the state is split off from it."""
        length = self.length[state] + 1
        if self.length[target] == length:
            return target
        clone = self._state(length, self.link[target], dict(self.next[target]))
        if target in self._seen:
            self._seen[clone] = dict(self._seen[target])
        self.link[target] = clone
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _state(self, length: int, link: int, ways: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append(ways)
        return len(self.length) - 1
