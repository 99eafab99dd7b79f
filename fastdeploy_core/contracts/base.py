"""Words every plugin shares: contract version, kinds and their entry-point groups, verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# (major, minor). It stays 0.x until two unlike devices and two unlike request schedulers have
# passed the conformance kit. Under major 0 a plugin works when its minor is not newer than ours.
CONTRACT: Final[tuple[int, int]] = (0, 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of driver: `name` on the command line, `group` in package metadata."""

    name: str
    group: str
    summary: str


KINDS: Final[dict[str, Kind]] = {
    k.name: k
    for k in (
        Kind(
            "device",
            "fastdeploy.devices",
            "memory, streams, events, collectives of one accelerator",
        ),
        Kind("attention", "fastdeploy.attention", "attention over the paged KV cache"),
        Kind("moe", "fastdeploy.moe", "mixture-of-experts layers"),
        Kind(
            "expert_communicator",
            "fastdeploy.expert_communicators",
            "token exchange between experts",
        ),
        Kind("quantizer", "fastdeploy.quantizers", "a weight or activation number format"),
        Kind("speculative", "fastdeploy.speculative", "a way to propose draft tokens"),
        Kind("scheduler", "fastdeploy.schedulers", "which instance gets a request"),
        Kind("kv_transport", "fastdeploy.kv_transports", "moving KV blocks between instances"),
        Kind("model", "fastdeploy.models", "a model architecture"),
        Kind("reasoning_parser", "fastdeploy.reasoning_parsers", "split thinking from answer"),
        Kind("tool_parser", "fastdeploy.tool_parsers", "find tool calls in text"),
        Kind("logits_processor", "fastdeploy.logits_processors", "change logits before sampling"),
        Kind("grammar", "fastdeploy.grammars", "constrain output to a grammar"),
        Kind("kernels", "fastdeploy.kernels", "table of operations one device implements"),
    )
}
HOOK_GROUP: Final = "fastdeploy.hooks"


@dataclass(frozen=True, slots=True)
class Accept:
    """The driver can serve what was asked; the highest score wins.

    Convention: 0 to 99 works, 100 to 199 tuned for this device, 200 and up tuned for this very case.
    """

    score: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """The driver cannot serve what was asked, and why, in words for the operator."""

    reason: str


Verdict = Accept | Decline


@dataclass(frozen=True, slots=True)
class Candidate:
    """One driver's answer to one question. `name` is its entry-point name."""

    name: str
    verdict: Verdict
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a method needs of the rest of the configuration; any `refusals` stop start-up."""

    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    extra_kv_layers: int = 0
    tokens_per_step: int = 1
