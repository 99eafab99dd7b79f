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

    from .attention import AttentionQuestion
    from .base import Candidate, Requirements
    from .device import DeviceQuestion
    from .kv_transport import TransportQuestion
    from .moe import MoEQuestion
    from .quantizer import QuantizationQuestion
    from .scheduler import SchedulerQuestion
    from .speculative import SpeculativeQuestion

PROJECT: Final = "fastdeploy"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def fd_device_probe(question: DeviceQuestion) -> Candidate | None:
    """Is this plugin's hardware here and usable? Called once at start-up, in the parent process.

    Must return within seconds and must not keep the device open. Added in contract 0.1.
    """


@hookspec
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate] | None:
    """Which of this plugin's attention drivers can serve this layer? Added in contract 0.1."""


@hookspec
def fd_moe_backends(question: MoEQuestion) -> list[Candidate] | None:
    """Which of this plugin's MoE drivers can serve this layer? Added in contract 0.1."""


@hookspec(firstresult=True)
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """Does this plugin read this quantization? First answer wins. Added in contract 0.1."""


@hookspec(firstresult=True)
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """What does this plugin's method need of the configuration? Added in contract 0.1."""


@hookspec(firstresult=True)
def fd_scheduler_requirements(question: SchedulerQuestion) -> Requirements | None:
    """What does this plugin's request scheduler need? Added in contract 0.1."""


@hookspec(firstresult=True)
def fd_kv_transport_for(question: TransportQuestion) -> Candidate | None:
    """Can this plugin move blocks between these places? First answer wins. Added in contract 0.1."""


@hookspec
def fd_register_models() -> Mapping[str, str] | None:
    """Architecture name to "module:Class", beside group fastdeploy.models. Added in contract 0.1."""


@hookspec
def fd_register_reasoning_parsers() -> Mapping[str, str] | None:
    """Parser name to "module:Class". Added in contract 0.1."""


@hookspec
def fd_register_tool_parsers() -> Mapping[str, str] | None:
    """Parser name to "module:Class". Added in contract 0.1."""


@hookspec
def fd_register_logits_processors() -> Mapping[str, str] | None:
    """Processor name to "module:Class". Added in contract 0.1."""


@hookspec
def fd_register_grammars() -> Mapping[str, str] | None:
    """Grammar backend name to "module:Class". Added in contract 0.1."""


@hookspec
def fd_configure(config: Any) -> None:
    """The configuration is final (an EngineConfig, read only). Added in contract 0.1."""


@hookspec
def fd_engine_started(info: Mapping[str, Any]) -> None:
    """An engine is ready; info: model, device, num_blocks, block_size. Added in contract 0.1."""


@hookspec
def fd_request_finished(info: Mapping[str, Any]) -> None:
    """A request ended; info: request_id, finish_reason, counts and seconds. Added in contract 0.1."""


@hookspec
def fd_step_stats(stats: Mapping[str, float]) -> None:
    """Sampled about once a second in the engine process. Added in contract 0.1."""


@hookspec
def fd_doctor_checks() -> list[tuple[str, bool, str]] | None:
    """(what was checked, passed, hint) rows for `fastdeploy plugins doctor`. Added in contract 0.1."""


@hookspec
def fd_cli_commands() -> Mapping[str, str] | None:
    """Extra commands: name to "module:function" taking the argument list. Added in contract 0.1."""


@hookspec
def fd_api_routes() -> list[Any] | None:
    """fastapi.APIRouter objects; mounted under /plugins/<distribution>, behind the same
    authentication as every route. Added in contract 0.1."""


@hookspec
def fd_shutdown() -> None:
    """The process is about to end. Added in contract 0.1."""
