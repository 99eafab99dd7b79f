"""Questions and events. Asked at start-up or per request, never per token or per layer.

A hook module named in group `fastdeploy.hooks` is light: it imports no tensor library and no vendor
software until it is asked. Implementations take any subset of the arguments, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    # Only names for readers and type checkers: importing hookimpl must stay cheap.
    from collections.abc import Mapping

    from .attention import AttentionQuestion, StateQuestion
    from .base import ApiRoutes, Candidate, Requirements
    from .device import DeviceQuestion
    from .kv_transport import TransportQuestion
    from .moe import ExpertQuestion, MoEQuestion
    from .quantizer import QuantizationQuestion
    from .scheduler import SchedulerQuestion
    from .speculative import SpeculativeQuestion

PROJECT: Final = "fastdeploy"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def fd_device_probe(question: DeviceQuestion) -> Candidate | None:
    """Is this plugin's hardware here and usable?

    Asked once at start-up, also when a device was named. A stranger's answer is made in a child
    process with a time limit, so opening the hardware here neither holds it nor can take the server
    down; it must return within seconds all the same. `details["tensor_library"]` of the candidate
    says which library the device will run on. Not asked in worker processes.
    Added in contract 1.0.
    """


@hookspec
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate] | None:
    """Which of this plugin's attention drivers can serve this layer?

    Asked at start-up in the parent process, once for each distinct attention shape of the model;
    one driver must accept all of them. Answer for own drivers only, with a Decline and its reason
    where it is worth knowing why. Not asked per step or per layer. Added in contract 1.0."""


@hookspec
def fd_state_backends(question: StateQuestion) -> list[Candidate] | None:
    """Which of this plugin's state drivers can serve this layer?

    Asked like fd_attention_backends, for models with layers that keep a state. Added in contract
    1.3."""


@hookspec
def fd_moe_backends(question: MoEQuestion) -> list[Candidate] | None:
    """Which of this plugin's MoE drivers can serve this layer?

    Asked like fd_attention_backends, for models with mixture-of-experts layers only.
    Added in contract 1.0.
    """


@hookspec
def fd_expert_communicators(question: ExpertQuestion) -> list[Candidate] | None:
    """Which of this plugin's expert communicators can carry tokens between these ranks?

    Asked once at start-up where experts are divided over ranks and a communicator is named, or
    "auto" asks for the best; otherwise tokens do not travel. Added in contract 1.0."""


@hookspec(firstresult=True)
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """Does this plugin read this quantization? The first answer wins.

    Asked at start-up when a format was named or the checkpoint's config.json has a
    quantization_config, not for full-precision models; before attention and experts are asked
    about. Return None for formats of others, and a Decline for an own format that cannot be served
    here: it stops start-up with its reason. `details["experts"]` of the answer names the internal
    formats that experts will come in, which MoE drivers are asked about next. `details["inner"]`
    names, divided by commas, the quantizers that this one is made of (quantizer.ComposedQuantizer).
    `details["options"]` names, divided by commas, what --quantization may say beside the method;
    with it, start-up refuses anything else. Added in contract 1.0.
    """


@hookspec(firstresult=True)
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """What does this plugin's method need of the configuration?

    Asked at start-up when a method was named; return None for methods of others. Any `refusals`
    stop start-up, `notes` go into its report. Added in contract 1.0.
    """


@hookspec(firstresult=True)
def fd_scheduler_requirements(question: SchedulerQuestion) -> Requirements | None:
    """What does this plugin's request scheduler need?

    Asked at start-up; `question.config.name` says which scheduler was named: return None for those
    of others. Refuse settings that cannot work, such as a missing address. Added in contract 1.0.
    """


@hookspec(firstresult=True)
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Can this plugin move blocks between these places? The first answer wins.

    Asked when two instances are about to exchange KV blocks, not in a deployment of one instance.
    Added in contract 1.0.
    """


@hookspec
def fd_register_models() -> Mapping[str, str] | None:
    """Architecture name to "module:Class", for plugins with many; few fit group fastdeploy.models.

    Asked when an architecture is not found among entry points. A name that is taken is ignored with
    a warning. Added in contract 1.0.
    """


@hookspec
def fd_register_reasoning_parsers() -> Mapping[str, str] | None:
    """Parser name to "module:Class", like fd_register_models, beside group
    fastdeploy.reasoning_parsers. Added in contract 1.0.
    """


@hookspec
def fd_register_tool_parsers() -> Mapping[str, str] | None:
    """Parser name to "module:Class", like fd_register_models, beside group
    fastdeploy.tool_parsers. Added in contract 1.0.
    """


@hookspec
def fd_register_logits_processors() -> Mapping[str, str] | None:
    """Processor name to "module:Class", like fd_register_models, beside group
    fastdeploy.logits_processors. Added in contract 1.0.
    """


@hookspec
def fd_register_grammars() -> Mapping[str, str] | None:
    """Grammar backend name to "module:Class", like fd_register_models, beside group
    fastdeploy.grammars. Added in contract 1.0.
    """


@hookspec
def fd_configure(config: Any) -> None:
    """The configuration is final: an EngineConfig, read only.

    Fires once per engine, before any device is opened. It is too late to change anything; raising
    is logged and ignored. Refuse in the ..._requirements hooks instead. Added in contract 1.0."""


@hookspec
def fd_engine_started(info: Mapping[str, Any]) -> None:
    """An engine is ready to serve; info: model, device, num_blocks, block_size.

    Fires once per engine, after warm-up and before the first request. Added in contract 1.0.
    """


@hookspec
def fd_request_finished(info: Mapping[str, Any]) -> None:
    """A request ended; info: request_id, finish_reason, counts and seconds.

    Fires in the serving loop for every request, aborted and failed ones included, so it must not
    block; after three failures it is not called again. No prompt or output text is in `info`.
    Added in contract 1.0; num_cached_tokens, queue_s and traceparent in 1.6.
    """


@hookspec
def fd_step_stats(stats: Mapping[str, float]) -> None:
    """Numbers of the engine, sampled about once a second in the engine process.

    Does not fire per step. It must not block; after three failures it is not called again.
    Added in contract 1.0.
    """


@hookspec
def fd_doctor_checks() -> list[tuple[str, bool, str]] | None:
    """(what was checked, passed, hint) rows for `fastdeploy plugins doctor`.

    Fires in a child process with a time limit, in no other command and never in a server.
    Added in contract 1.0.
    """


@hookspec
def fd_api_routes() -> list[Any] | None:
    """fastapi.APIRouter objects, mounted under /plugins/<distribution>.

    Asked once when the API server starts. The routes stand behind the same authentication and
    limits as every other. Added in contract 1.0.
    """


@hookspec
def fd_api_routes_at_root() -> list[ApiRoutes] | None:
    """Routes at paths of their own, such as /v1/messages: another API than the core's.

    Asked like fd_api_routes. A path and method that the core or another plugin serves is an error
    at start-up; no plugin replaces another's route. Added in contract 1.1."""


@hookspec
def fd_shutdown() -> None:
    """The process is about to end in good order; give back what is held.

    Does not fire when the process is killed. Added in contract 1.0.
    """
