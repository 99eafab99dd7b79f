"""Words every plugin shares: contract version, kinds and their entry-point groups, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# (major, minor); docs/reference/contract.md says what a number promises. A driver declares the one
# that it was written for as a literal, `contract = (1, 0)`, never this constant.
CONTRACT: Final[tuple[int, int]] = (1, 7)
# Drivers written for an older major are served from here on. A major raises it to the one before.
OLDEST_MAJOR: Final = 1

# The distribution that owns this contract; its own drivers are always enabled.
DISTRIBUTION: Final = "fastdeploy-core"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of driver: `name` on the command line, `group` in package metadata.

    `protocol` is the class that drivers implement, as "module:Class". A `versioned` driver declares
    `contract = (major, minor)`. Several distributions may share one entry name only where `shared`.
    """

    name: str
    group: str
    summary: str
    protocol: str
    versioned: bool = True
    shared: bool = False


_HERE = "fastdeploy_core.contracts"

KINDS: Final[dict[str, Kind]] = {
    k.name: k
    for k in (
        Kind(
            "device",
            "fastdeploy.devices",
            "memory, streams, events, collectives of one accelerator",
            f"{_HERE}.device:DeviceBackend",
        ),
        Kind(
            "attention",
            "fastdeploy.attention",
            "attention over the paged KV cache",
            f"{_HERE}.attention:AttentionBackend",
        ),
        Kind(
            "state",
            "fastdeploy.states",
            "layers that keep a state per sequence",
            f"{_HERE}.attention:StateBackend",
        ),
        Kind("moe", "fastdeploy.moe", "mixture-of-experts layers", f"{_HERE}.moe:MoEBackend"),
        Kind(
            "expert_communicator",
            "fastdeploy.expert_communicators",
            "token exchange between experts",
            f"{_HERE}.moe:ExpertCommunicator",
        ),
        Kind(
            "quantizer",
            "fastdeploy.quantizers",
            "a weight or activation number format",
            f"{_HERE}.quantizer:Quantizer",
        ),
        Kind(
            "speculative",
            "fastdeploy.speculative",
            "a way to propose draft tokens",
            f"{_HERE}.speculative:Drafter",
        ),
        Kind(
            "scheduler",
            "fastdeploy.schedulers",
            "which instance gets a request",
            f"{_HERE}.scheduler:RequestScheduler",
        ),
        Kind(
            "kv_transport",
            "fastdeploy.kv_transports",
            "moving KV blocks between instances",
            f"{_HERE}.kv_transport:KVTransport",
        ),
        Kind(
            "kv_store",
            "fastdeploy.kv_stores",
            "keeping KV blocks outside the engine",
            f"{_HERE}.small:KVStore",
        ),
        Kind(
            "model",
            "fastdeploy.models",
            "a model architecture",
            f"{_HERE}.small:CausalLM",
            versioned=False,
        ),
        Kind(
            "checkpoint_format",
            "fastdeploy.checkpoint_formats",
            "a way to store a model, by the suffix of its files",
            f"{_HERE}.small:CheckpointFormat",
        ),
        Kind(
            "model_source",
            "fastdeploy.model_sources",
            "where models that are named come from",
            f"{_HERE}.small:ModelSource",
        ),
        Kind(
            "reasoning_parser",
            "fastdeploy.reasoning_parsers",
            "split thinking from answer",
            f"{_HERE}.small:ReasoningParser",
            versioned=False,
        ),
        Kind(
            "tool_parser",
            "fastdeploy.tool_parsers",
            "find tool calls in text",
            f"{_HERE}.small:ToolParser",
            versioned=False,
        ),
        Kind(
            "logits_processor",
            "fastdeploy.logits_processors",
            "change logits before sampling",
            f"{_HERE}.small:LogitsProcessor",
            versioned=False,
        ),
        Kind(
            "grammar",
            "fastdeploy.grammars",
            "constrain output to a grammar",
            f"{_HERE}.small:GrammarBackend",
        ),
        Kind("launcher", "fastdeploy.launchers", "where servers run", f"{_HERE}.small:Launcher"),
        Kind(
            "command",
            "fastdeploy.commands",
            "a command of `fastdeploy`",
            f"{_HERE}.command:Command",
            versioned=False,
        ),
        Kind(
            "part",
            "fastdeploy.parts",
            "a part of the core in a distribution of its own, asked for by an argument",
            "",
            versioned=False,
        ),
        Kind(
            "kernels",
            "fastdeploy.kernels",
            "table of operations one device implements",
            "",
            versioned=False,
            shared=True,
        ),
    )
}
HOOK_GROUP: Final = "fastdeploy.hooks"


@dataclass(frozen=True, slots=True)
class Accept:
    """The driver can serve what was asked; the highest score wins.

    Convention: 0 to 99 works, 100 to 199 tuned for this device, 200 and up tuned for this very
    case."""

    score: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """The driver cannot serve what was asked, and why, in words for the operator."""

    reason: str


Verdict = Accept | Decline


@dataclass(frozen=True, slots=True)
class Candidate:
    """One driver's answer to one question. `name` is its entry-point name.

    `details` are facts for the start-up report. Some also travel into later questions: of a device
    `tensor_library`, the library the driver will run on; of a quantizer `experts`, the internal
    formats of the experts (MoEQuestion.quantization), and `inner`, the quantizers that it is made
    of."""

    name: str
    verdict: Verdict
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a method needs of the rest of the configuration; any `refusals` stop start-up."""

    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Tokens after the known ones whose cache slots a drafter writes: blocks are reserved for them.
    lookahead_tokens: int = 0
    # Following tokens that a drafter's cache entry depends on beside its own prefix: the prefix
    # cache then only shares a block among sequences that also agree on so many tokens after it.
    key_lookahead: int = 0
    # A host drafter that goes on after a device drafter's drafts (HostDraftInput.drafts), once
    # these have reached the host with the step's tokens; and its own options.
    continued_by: str = ""
    continued_options: Mapping[str, Any] = field(default_factory=dict)
    # Folder of a model that the drafter asks DrafterContext.load_model for, and its number format:
    # the family's plugin and the quantizer are then chosen with everything else.
    draft_model: str = ""
    draft_quantization: str = ""


# (HTTP status, message, field at fault or None, request id) to the body of an error
ErrorBody = Callable[[int, str, str | None, str], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ApiRoutes:
    """Routes of one API. `router` is a fastapi.APIRouter with routes of its own, none included.

    `error_body` writes errors on its paths in the shape of that API, also those of keys and limits,
    which arise before the route is called; None: OpenAI's. Added in contract 1.1.
    """

    router: Any
    error_body: ErrorBody | None = None
