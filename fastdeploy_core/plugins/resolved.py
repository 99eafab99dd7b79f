"""The choices of start-up: the record that every process receives and loads from."""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from typing import Any

import msgspec

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.errors import PluginConflict, PluginNotFound

from .discovery import Inventory, PluginEntry, discover
from .drivers import load
from .negotiate import Decision


class ResolvedPlugins(msgspec.Struct, frozen=True):
    """The chosen plugins; can be encoded as MessagePack and is the same in every process."""

    entries: list[PluginEntry]
    chosen: dict[str, str]
    decisions: list[Decision] = []
    notes: list[str] = []
    tensor_library: str = ""  # empty: the device driver's own choice
    speculative: Requirements = Requirements()

    def name(self, kind: str) -> str:
        """The chosen driver's name; empty if the configuration needs none of that kind."""
        return self.chosen.get(kind, "")

    def names(self, kind: str) -> list[str]:
        """Names of that kind that may be loaded here."""
        return [e.name for e in self.entries if e.kind == kind]

    def entry(self, kind: str, name: str = "") -> PluginEntry:
        """The entry of the chosen driver, or of another resolved one."""
        wanted = name or self.name(kind)
        for entry in self.entries:
            if entry.kind == kind and entry.name == wanted:
                return entry
        raise PluginNotFound(
            f"no {kind} driver {wanted!r} was resolved at start-up; "
            f"resolved: {', '.join(self.names(kind)) or 'none'}"
        )

    @property
    def grammar(self) -> PluginEntry | None:
        """The grammar backend, if the deployment has one; nobody needs to have asked for it."""
        return next(iter(self.plugin_entries("grammar")), None)

    def load(self, kind: str, name: str = "") -> Any:
        """The class (or kernel table) of the chosen driver, or of the named one."""
        return load(self.entry(kind, name), preflight=False)

    def strangers(self) -> list[PluginEntry]:
        """Third parties' drivers that this configuration certainly loads."""
        several = ("logits_processor", "quantizer")
        others = [entry for entry in self.entries if not entry.is_core]
        return [e for e in others if self.chosen.get(e.kind) == e.name or e.kind in several]

    def plugin_entries(self, kind: str) -> list[PluginEntry]:
        """All entries of one kind, in order; of HOOKS those that were loaded successfully."""
        return [e for e in self.entries if e.kind == kind]

    @property
    def digest(self) -> str:
        """SHA-256 over all that would be loaded; equal in all processes of one deployment."""
        rows = sorted(astuple(entry) for entry in self.entries)
        return hashlib.sha256(msgspec.json.encode([rows, self.chosen])).hexdigest()

    def verify(self, digest: str = "", *, inventory: Inventory | None = None) -> None:
        """Called where the record was received: the same plugins must be installed there."""
        if digest and digest != self.digest:
            raise PluginConflict(
                f"this process resolved other plugins than its parent: digest {self.digest[:12]} "
                f"here, {digest[:12]} there; use one environment for all processes"
            )
        here = (discover() if inventory is None else inventory).distributions()
        for entry in self.entries:
            if here.get(entry.distribution) != entry.version:
                found = here.get(entry.distribution, "none")
                raise PluginConflict(
                    f"{entry.kind} {entry.name!r} was resolved from {entry.distribution} "
                    f"{entry.version}, this process has {found}; use one environment for all"
                )

    def report(self) -> list[str]:
        """Lines for the start-up log: one per decision, then notes."""
        return [f"{d.kind} {d.winner}: {d.why}" for d in self.decisions] + self.notes
