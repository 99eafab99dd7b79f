"""From a configuration to the drivers that will run it: ask, compare, decide once, explain.

The parent process resolves. Every other process receives ResolvedPlugins, loads exactly these and
compares digests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.config.model import read_json
from fastdeploy_core.config.other_flags import OTHER_DRIVERS
from fastdeploy_core.config.quantization import (
    QuantizationSettings,
    check_options,
    quantization_of,
    read_quantization,
)
from fastdeploy_core.contracts.base import Candidate, Decline, Requirements
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.kv_formats import kv_format
from fastdeploy_core.contracts.model import AttentionSpec, StateSpec, spec_within
from fastdeploy_core.contracts.quantizer import HEAD_QUANTIZER, QuantizationQuestion
from fastdeploy_core.errors import (
    CapabilityError,
    ConfigError,
    PluginError,
    PluginNotFound,
    UnsupportedModel,
)

from .discovery import Inventory, PluginEntry, discover
from .drivers import available, broken, find, find_part, import_soon, without_broken
from .known import providers
from .manager import HookManager, hook_manager
from .negotiate import ASKED, CandidateRow, Decision, ask_candidates, ask_layer_drivers, decide
from .resolved import ResolvedPlugins

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.moe import MoESpec

__all__ = ["CandidateRow", "Decision", "ResolvedPlugins", "resolve"]

logger = logging.getLogger(__name__)

REFERENCE_DEVICE: Final = "cpu"
_LIST_QUANTIZERS: Final = "fastdeploy plugins list --kind quantizer"
# Key of the quantizer of a draft model's own weights among the chosen drivers.
DRAFT_QUANTIZER: Final = "draft_quantizer"


def resolve(
    config: EngineConfig,
    *,
    layers: Sequence[AttentionSpec | StateSpec] = (),
    moe: Sequence[MoESpec] = (),
    inventory: Inventory | None = None,
    hooks: HookManager | None = None,
) -> ResolvedPlugins:
    """Choose every driver that the configuration needs; raises if one cannot be had.

    A third party's driver that is chosen is imported in a child process first. If it fails there,
    the next candidate is chosen, unless the driver was asked for by name.
    `layers` and `moe` are the model's layer shapes (models/shapes.py reads them).
    """
    inventory = discover() if inventory is None else inventory
    devices = (config.device.device, REFERENCE_DEVICE)
    import_soon(entry for entry in inventory.of("kernels") if entry.name in devices)
    if hooks is None:
        library = config.device.tensor_library
        hooks = hook_manager(inventory=inventory, tensor_library=library)
    resolved = _resolve(config, layers, moe, inventory, hooks)
    left_out: dict[PluginEntry, PluginError] = {}
    while errors := broken(resolved.strangers()):
        for entry, error in errors.items():
            decision = next((d for d in resolved.decisions if d.kind == entry.kind), None)
            if decision is None or decision.why == ASKED or entry.kind in _CHOSEN_BY_NAME:
                raise error
        # All that might be next are tried side by side, not one after the other.
        accepted = {
            (d.kind, c.name) for d in resolved.decisions for c in d.candidates if c.accepted
        }
        kinds = {entry.kind for entry in errors}
        rivals = [e for k in kinds for e in inventory.of(k) if (k, e.name) in accepted]
        left_out |= broken([e for e in rivals if not e.is_core])
        inventory = without_broken(inventory, rivals)
        resolved = _resolve(config, layers, moe, inventory, hooks)
    for error in left_out.values():
        resolved.notes.append(f"{error}; it is left out, the next candidate is used")
        logger.warning("%s", resolved.notes[-1])
    tables = [table for table in resolved.plugin_entries("kernels") if not table.is_core]
    gone = broken(tables)
    resolved.entries[:] = [entry for entry in resolved.entries if entry not in gone]
    for error in gone.values():
        resolved.notes.append(f"{error}; it is left out")
        logger.warning("%s", resolved.notes[-1])
    for problem in inventory.problems:
        logger.warning("%s", problem)
    for decision in resolved.decisions:
        logger.info("%s %s: %s", decision.kind, decision.winner, decision.why)
    hooks.notify("fd_configure", config=config)
    return resolved


# Kinds whose driver the configuration or the checkpoint names.
_CHOSEN_BY_NAME: Final = ("scheduler", "speculative", "quantizer", "kv_store")


def _resolve(
    config: EngineConfig,
    layers: Sequence[AttentionSpec | StateSpec],
    moe: Sequence[MoESpec],
    inventory: Inventory,
    hooks: HookManager,
) -> ResolvedPlugins:
    resolver = _Resolver(config, inventory, hooks)
    resolver.device()
    resolver.quantizer()
    resolver.attention(layers)
    resolver.states(layers)
    resolver.moe(moe)
    resolver.speculative()
    resolver.scheduler()
    resolver.by_name()
    return resolver.finish()


def attention_questions(
    layers: Sequence[AttentionSpec | StateSpec],
    *,
    device: str,
    tensor_library: str,
    block_size: int,
    quantization: QuantizationSettings,
    max_model_len: int,
    objective: str = "",
) -> list[AttentionQuestion]:
    """What attention drivers are asked about a model: one question for each distinct layer that
    keeps entries per token."""
    from fastdeploy_core.contracts.attention import AttentionQuestion

    kind = kv_format(quantization.kv_format)
    cache_format = kind.name if kind else ""
    questions = {}
    for spec in layers:
        if isinstance(spec, StateSpec):
            continue
        spec = spec_within(spec, max_model_len)
        questions[spec] = AttentionQuestion(
            device=device,
            tensor_library=tensor_library,
            spec=replace(spec, kv_format=cache_format, kv_static=quantization.kv_static),
            block_size=block_size,
            kv_dtype=cache_format or "auto",
            plain_projections=not quantization.method,
            objective=objective,
        )
    return list(questions.values())


class _Resolver:
    """Collects the parts of one ResolvedPlugins."""

    def __init__(self, config: EngineConfig, inventory: Inventory, hooks: HookManager) -> None:
        self._config = config
        self._inventory = inventory
        self._hooks = hooks
        self._entries: dict[tuple[str, str, str], PluginEntry] = {}
        self._chosen: dict[str, str] = {}
        self._decisions: list[Decision] = []
        self._notes: list[str] = []
        self._tensor_library = config.device.tensor_library
        self._requirements = Requirements()
        self._quantization = quantization_of(config)
        self._expert_formats = ""
        # Formats of the experts by the quantizer that another is made of.
        self._inner_experts: dict[str, str] = {}

    def device(self) -> None:
        """The accelerator: the one asked for by name, or the best one whose hardware is present."""
        asked = self._config.device.device
        question = DeviceQuestion(tensor_library=self._config.device.tensor_library)
        if asked:
            # raises a helpful error before anything is probed
            find("device", asked, self._inventory)
        decision, candidates = ask_candidates(
            self._hooks, self._inventory, "device", "fd_device_probe", question, asked
        )
        self._take(decision)
        for candidate in candidates:
            if candidate.name == decision.winner and not self._tensor_library:
                self._tensor_library = candidate.details.get("tensor_library", "")
        for entry in self._inventory.of("kernels"):
            if entry.name in (decision.winner, REFERENCE_DEVICE):
                self._add(entry)

    def attention(self, layers: Sequence[AttentionSpec | StateSpec]) -> None:
        """One driver that accepts every attention shape of the model."""
        questions = attention_questions(
            layers,
            device=self._chosen["device"],
            tensor_library=self._tensor_library,
            block_size=self._config.cache.block_size,
            quantization=self._quantization,
            max_model_len=self._config.model.max_model_len,
            objective=self._config.device.kernel_objective,
        )
        self._layer_driver(
            "attention", "fd_attention_backends", questions, self._config.device.attention_backend
        )

    def states(self, layers: Sequence[AttentionSpec | StateSpec]) -> None:
        """One driver that accepts every layer of the model that keeps a state."""
        from fastdeploy_core.contracts.attention import StateQuestion

        place = (self._chosen["device"], self._tensor_library)
        kept = self._config.kept_states
        states = (replace(spec, kept=kept) for spec in layers if isinstance(spec, StateSpec))
        questions = [StateQuestion(*place, spec) for spec in dict.fromkeys(states)]
        self._layer_driver("state", "fd_state_backends", questions, "")

    def moe(self, specs: Sequence[MoESpec]) -> None:
        """One driver that accepts every mixture-of-experts shape of the model."""
        from fastdeploy_core.contracts.moe import MoEQuestion

        questions = [
            MoEQuestion(
                device=self._chosen["device"],
                tensor_library=self._tensor_library,
                spec=spec,
                quantization=self._expert_formats,
                objective=self._config.device.kernel_objective,
            )
            for spec in dict.fromkeys(specs)
        ]
        self._layer_driver("moe", "fd_moe_backends", questions, self._config.device.moe_backend)
        if questions and self._config.parallel.divides_experts:
            asked = "--enable-expert-parallel"
            self._add(find_part("experts", asked, self._inventory))
            self._expert_communicator()

    def _expert_communicator(self) -> None:
        """The driver that carries tokens between ranks, if one is asked for."""
        from fastdeploy_core.contracts.moe import ExpertQuestion

        parallel = self._config.parallel
        if not parallel.expert_communicator:
            return
        question = ExpertQuestion(
            device=self._chosen["device"],
            tensor_library=self._tensor_library,
            num_ranks=parallel.num_ranks,
        )
        asked = parallel.expert_communicator
        self._layer_driver(
            "expert_communicator",
            "fd_expert_communicators",
            [question],
            "" if asked == "auto" else asked,
        )

    def quantizer(self) -> None:
        """The quantizer that reads the checkpoint's quantization_config or makes the format."""
        self._expert_formats = self._quantizer(self._quantization, "quantizer")

    def _quantizer(self, settings: QuantizationSettings, place: str) -> str:
        """Choose a quantizer and store it as `place`; nothing is chosen without a format. Returns
        the formats in which it passes experts to the MoE driver."""
        name, config = settings.method, settings.config
        if not name:
            return ""
        question = QuantizationQuestion(
            name=name,
            config=config,
            device=self._chosen["device"],
            tensor_library=self._tensor_library,
        )
        answer = self._hooks.first("fd_quantizer_for", question=question)
        if answer is not None and isinstance(answer.value, Candidate):
            candidate: Candidate = answer.value
            candidates = [(candidate, answer.plugin.distribution)]
            self._take(decide("quantizer", name, candidates), place)
            self._inner_quantizers(candidate, question)
            if "options" in candidate.details:
                check_options(settings, candidate.details["options"].split(","))
            experts = candidate.details.get("experts", "")
            return self._inner_experts.get(experts, experts)
        if config.get("is_quantized"):
            provider = providers("quantizer").get(name)
            hint = f"run: pip install {provider}" if provider else f"see: {_LIST_QUANTIZERS}"
            raise UnsupportedModel(
                f"the checkpoint is quantized with {dict(config)!r:.200} and no installed "
                f"quantizer reads that; installed: "
                f"{', '.join(available('quantizer', self._inventory)) or 'none'}; {hint}"
            )
        self._take(decide("quantizer", name, [], asked=name), place)
        return ""

    def _inner_quantizers(self, outer: Candidate, question: QuantizationQuestion) -> None:
        """Those that the chosen one is made of (details["inner"]), and the one for shared heads."""
        if HEAD_QUANTIZER in available("quantizer", self._inventory):
            self._add(find("quantizer", HEAD_QUANTIZER, self._inventory))
        for name in filter(None, outer.details.get("inner", "").split(",")):
            entry = find("quantizer", name, self._inventory)
            key = (entry.kind, entry.name, entry.distribution)
            if key in self._entries:
                continue
            self._add(entry)
            config = {**question.config, "quantization": name}
            inner = replace(question, name=name, config=config)
            answer = self._hooks.first("fd_quantizer_for", question=inner)
            if answer is None or not isinstance(answer.value, Candidate):
                continue
            if isinstance(answer.value.verdict, Decline):
                raise CapabilityError(
                    f"quantizer {outer.name} is made of {name} here, and that declines: "
                    f"{answer.value.verdict.reason}; see: fastdeploy plugins why quantizer"
                )
            self._inner_experts[name] = answer.value.details.get("experts", name)
            self._inner_quantizers(answer.value, inner)

    def speculative(self) -> None:
        """The drafting method, and its requirements."""
        from fastdeploy_core.contracts.speculative import SpeculativeQuestion

        asked = self._config.speculative
        if asked is None:
            return
        question = SpeculativeQuestion(
            method=asked.method,
            num_speculative_tokens=asked.num_speculative_tokens,
            architecture=self._config.model.architecture,
            hf_config=self._config.model.hf_config,
            options=asked.options,
            model_path=str(self._config.model.path),
            vocab_size=int(self._config.model.hf_config.get("vocab_size") or 0),
            max_model_len=self._config.model.max_model_len,
            tensor_parallel_size=self._config.parallel.tensor_parallel_size,
            device=self._chosen["device"],
            tensor_library=self._tensor_library,
        )
        self._take(decide("speculative", asked.method, [], asked=asked.method))
        self._requirements = self._ask_requirements(
            "fd_speculative_requirements", question, f"speculative method {asked.method!r}"
        )
        needs = self._requirements
        if needs.continued_by:
            self._add(find("speculative", needs.continued_by, self._inventory))
        draft: dict[str, Any] = {}
        if needs.draft_model:
            draft = read_json(Path(needs.draft_model) / "config.json")
            self._add_family(str((draft.get("architectures") or [""])[0]))
        settings = read_quantization(
            replace(self._config.model, hf_config=draft, quantization=needs.draft_quantization)
        )
        self._quantizer(settings, DRAFT_QUANTIZER)

    def scheduler(self) -> None:
        """The request scheduler by name."""
        from fastdeploy_core.contracts.scheduler import SchedulerQuestion

        name = self._config.request_scheduler.name
        decision = decide("scheduler", name, [], asked=name)
        if name == RequestSchedulerConfig().name:
            decision = msgspec.structs.replace(decision, why="the default")
        self._take(decision)
        self._ask_requirements(
            "fd_scheduler_requirements",
            SchedulerQuestion(self._config.request_scheduler),
            f"request scheduler {name!r}",
        )

    def by_name(self) -> None:
        """Kinds chosen by name alone."""
        architecture = self._config.model.architecture
        if architecture:
            self._add_family(architecture)
            self._chosen["model"] = architecture
        if self._config.model.checkpoint_format:
            self._add(
                find("checkpoint_format", self._config.model.checkpoint_format, self._inventory)
            )
        if self._config.device.capture_shapes:
            self._add(find_part("shapes", "--capture-shapes", self._inventory))
        if self._config.model.weight_cache:
            self._add(find_part("weight-cache", "--weight-cache", self._inventory))
        if self._config.lora is not None:
            self._add(find_part("lora", "--enable-lora", self._inventory))
        if name := self._config.cache.kv_store:
            self._take(decide("kv_store", name, [], asked=name))
            self._add(find_part("kv-store", "--kv-store", self._inventory))
        self._kv_transport()
        if self._config.cache.events is not None:
            self._add(find_part("kv-events", "--kv-events-config", self._inventory))
        for name in self._config.logits_processors:
            if ":" not in name:  # "module:Class" is the operator's own code, not a plugin
                self._add(find("logits_processor", name, self._inventory))
        self._grammar()

    def _kv_transport(self) -> None:
        """The driver that hands KV blocks to other instances, and the part that uses it."""
        from fastdeploy_core.contracts.kv_transport import TransportQuestion

        if not (asked := self._config.handover.transport):
            return
        asked = "" if asked == "auto" else asked
        is_near = not self._config.handover.address
        question = TransportQuestion(is_near or asked == "shm", self._chosen["device"], asked)
        kind, hook = "kv_transport", "fd_kv_transport_for"
        self._take(ask_candidates(self._hooks, self._inventory, kind, hook, question, asked)[0])
        self._add(find_part("kv-handover", "--kv-transport", self._inventory))

    def _grammar(self) -> None:
        """At most one grammar backend. One that is not asked for by name is not among the chosen:
        it need not work before a request needs it."""
        asked = self._config.structured_outputs.backend
        asked = self._driver_here("grammar", "--guided-decoding-backend", asked)
        if asked == "off":
            return
        if asked not in ("", "auto"):
            self._add(find("grammar", asked, self._inventory))
            self._chosen["grammar"] = asked
            return
        names = available("grammar", self._inventory)
        if len(names) > 1:
            raise ConfigError(
                f"several grammar backends are installed: {', '.join(names)}; say which with "
                f"--guided-decoding-backend, or off for none"
            )
        for name in names:
            self._add(find("grammar", name, self._inventory))

    def _add_family(self, architecture: str) -> None:
        try:
            self._add(find("model", architecture, self._inventory))
        except PluginNotFound as error:
            raise UnsupportedModel(str(error)) from None

    def finish(self) -> ResolvedPlugins:
        """Build the ResolvedPlugins."""
        for entry in self._hooks.entries:
            self._add(entry)
        return ResolvedPlugins(
            entries=list(self._entries.values()),
            chosen=self._chosen,
            decisions=self._decisions,
            notes=[*self._notes, *self._inventory.problems, *self._hooks.problems],
            tensor_library=self._tensor_library,
            speculative=self._requirements,
        )

    def _layer_driver(self, kind: str, hook: str, questions: Sequence[Any], asked: str) -> None:
        asked = self._driver_here(kind, f"--{kind}-backend", asked)
        if asked:
            find(kind, asked, self._inventory)
        if questions:
            self._take(
                ask_layer_drivers(self._hooks, self._inventory, kind, hook, questions, asked)
            )

    def _driver_here(self, kind: str, flag: str, asked: str) -> str:
        """`asked`; or "" with a line in the log, where only vLLM has a driver of that name."""
        is_other = asked.lower() in OTHER_DRIVERS.get(kind, ())
        if not is_other or asked in available(kind, self._inventory):
            return asked
        why = f"it is vLLM's; what is installed is used: fastdeploy plugins list --kind {kind}"
        logger.warning("%s %s has no effect: %s", flag, asked, why)
        return ""

    def _ask_requirements(self, hook: str, question: Any, what: str) -> Requirements:
        answer = self._hooks.first(hook, question=question)
        if answer is None or not isinstance(answer.value, Requirements):
            return Requirements()
        requirements = answer.value
        if requirements.refusals:
            raise ConfigError(
                f"{what} of {answer.plugin.origin} cannot run with this configuration: "
                f"{'; '.join(requirements.refusals)}"
            )
        self._notes.extend(requirements.notes)
        return requirements

    def _take(self, decision: Decision, place: str = "") -> None:
        """Record a decision, or raise with its whole table. `place`: the key among the chosen
        drivers, if it differs from the kind."""
        self._decisions.append(decision)
        if not decision.winner:
            rows = "; ".join(
                f"{r.name} ({r.distribution}): {r.reason}" for r in decision.candidates
            )
            raise CapabilityError(
                f"no {decision.kind} driver can be used: {decision.why}; asked for "
                f"{decision.question}; candidates: {rows or 'none'}; "
                f"see: fastdeploy plugins why {decision.kind}"
            )
        self._add(find(decision.kind, decision.winner, self._inventory))
        self._chosen[place or decision.kind] = decision.winner

    def _add(self, entry: PluginEntry) -> None:
        self._entries[entry.kind, entry.name, entry.distribution] = entry
