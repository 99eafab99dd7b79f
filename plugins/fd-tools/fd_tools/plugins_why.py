"""`fastdeploy plugins why KIND`: asks what the engine would ask, and prints every answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.base import DISTRIBUTION, KINDS, Accept, Candidate, Decline
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.contracts.ops import OBJECTIVES
from fastdeploy_core.errors import ConfigError, FastDeployError
from fastdeploy_core.plugins.discovery import Inventory, discover
from fastdeploy_core.plugins.drivers import find, without_broken
from fastdeploy_core.plugins.manager import HookManager, hook_manager
from fastdeploy_core.plugins.negotiate import (
    ASKED,
    Decision,
    ask_candidates,
    ask_layer_drivers,
    decide,
)
from fastdeploy_core.plugins.report import table

from .plugins_output import answer, asking_plugins

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quantizer import QuantizationQuestion


def main(argv: Sequence[str]) -> int:
    """Print the decision; exit code 1 when nothing can be chosen."""
    arguments = _parser().parse_args(argv)
    with asking_plugins():
        decisions, problems = _decide(arguments)
    if arguments.json:
        data = [_as_data(d) for d in decisions]
        answer(json.dumps({"decisions": data, "problems": problems}, indent=2))
    else:
        answer("\n\n".join(_as_table(d) for d in decisions))
    return 0 if decisions and all(d.winner for d in decisions) else 1


def _decide(arguments: argparse.Namespace) -> tuple[list[Decision], list[str]]:
    """The decisions, and what plugins did wrong."""
    inventory = discover()
    hooks = hook_manager(inventory=inventory)
    explain = _EXPLAIN.get(arguments.kind, _by_name)
    while True:
        decisions = explain(arguments, inventory, hooks)
        without = _without_broken(inventory, arguments.kind, decisions)
        if without is inventory:
            return decisions, [*inventory.problems, *hooks.problems]
        inventory = without


def _without_broken(inventory: Inventory, kind: str, decisions: Sequence[Decision]) -> Inventory:
    """As a start does: a negotiated winner that cannot be imported is declined, so that all are
    asked again; the same inventory where all can."""
    own = [d for d in decisions if d.kind == kind and d.why != ASKED]
    if kind not in _NEGOTIATED or not own:
        return inventory
    entries = inventory.of(kind)
    without = without_broken(inventory, [e for e in entries if e.name in {d.winner for d in own}])
    if without is inventory:
        return inventory
    accepted = {c.name for d in own for c in d.candidates if c.accepted}
    return without_broken(inventory, [e for e in entries if e.name in accepted])


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins why", description="Every candidate, its answer, and the winner."
    )
    parser.add_argument("kind", choices=list(KINDS), help="what is to be chosen")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model folder (attention, kernels, model, moe, parsers, quantizer)",
    )
    parser.add_argument("--device", default="", help="device instead of the negotiated one")
    parser.add_argument("--dtype", default="auto", help="model dtype")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default="", help="number format by name")
    parser.add_argument("--kernel-objective", default="", choices=["", *OBJECTIVES])
    parser.add_argument("--json", action="store_true", help="the stable form for programs")
    return parser


def _device(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    return [_ask_device(arguments, inventory, hooks)[0]]


def _ask_device(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> tuple[Decision, list[Candidate]]:
    while True:
        decision, candidates = ask_candidates(
            hooks, inventory, "device", "fd_device_probe", DeviceQuestion(), arguments.device
        )
        without = _without_broken(inventory, "device", [decision])
        if without is inventory:
            return decision, candidates
        inventory = without


def _place(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> tuple[str, str]:
    """(device, tensor library) that the layers would run on."""
    decision, candidates = _ask_device(arguments, inventory, hooks)
    if not decision.winner:
        raise ConfigError(f"no device can be used, so nothing else can be asked: {decision.why}")
    details = next((c.details for c in candidates if c.name == decision.winner), {})
    return decision.winner, details.get("tensor_library", "")


def _shapes(arguments: argparse.Namespace) -> ModelShapes:
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.models.shapes import read_shapes
    from fastdeploy_core.plugins.checkpoints import find_model

    if not arguments.model:
        raise ConfigError(
            f"`why {arguments.kind}` depends on the model's shapes; add --model DIR "
            "(a folder with config.json)"
        )
    config = read_model_config(arguments.model, {"dtype": arguments.dtype}, find_model)
    return read_shapes(config.hf_config, arguments.tensor_parallel_size, config.dtype)


def _attention(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.config.quantization import read_quantization
    from fastdeploy_core.plugins.resolve import attention_questions

    shapes = _shapes(arguments)
    device, library = _place(arguments, inventory, hooks)
    asked = {"dtype": arguments.dtype, "quantization": arguments.quantization}
    model = read_model_config(arguments.model, asked)
    questions = attention_questions(
        shapes.layers,
        device=device,
        tensor_library=library,
        block_size=arguments.block_size,
        quantization=read_quantization(model, arguments.kv_cache_dtype),
        max_model_len=model.max_model_len,
        objective=arguments.kernel_objective,
    )
    return [ask_layer_drivers(hooks, inventory, "attention", "fd_attention_backends", questions)]


def _state(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    from fastdeploy_core.contracts.attention import StateQuestion, StateSpec

    shapes = _shapes(arguments)
    place = _place(arguments, inventory, hooks)
    specs = dict.fromkeys(spec for spec in shapes.layers if isinstance(spec, StateSpec))
    questions = [StateQuestion(*place, spec) for spec in specs]
    if not questions:
        raise ConfigError(f"{shapes.architecture} has no layers that keep a state")
    return [ask_layer_drivers(hooks, inventory, "state", "fd_state_backends", questions)]


def _moe(arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager) -> list[Decision]:
    from fastdeploy_core.contracts.moe import MoEQuestion

    shapes = _shapes(arguments)
    if shapes.moe is None:
        raise ConfigError(f"{shapes.architecture} has no mixture-of-experts layers")
    device, library = _place(arguments, inventory, hooks)
    question = MoEQuestion(
        device=device,
        tensor_library=library,
        spec=shapes.moe,
        quantization=_expert_formats(arguments, inventory, hooks),
        objective=arguments.kernel_objective,
    )
    return [ask_candidates(hooks, inventory, "moe", "fd_moe_backends", question)[0]]


def _expert_communicator(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    from fastdeploy_core.contracts.moe import ExpertQuestion

    device, library = _place(arguments, inventory, hooks)
    question = ExpertQuestion(device, library, max(2, arguments.tensor_parallel_size))
    hook = "fd_expert_communicators"
    return [ask_candidates(hooks, inventory, "expert_communicator", hook, question)[0]]


def _quantization_question(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> QuantizationQuestion | None:
    """What the engine would ask; None where the model is in full precision."""
    from fastdeploy_core.config.quantization import parse_quantization, read_quantization
    from fastdeploy_core.contracts.quantizer import QuantizationQuestion

    if arguments.model:
        from fastdeploy_core.config.model import read_model_config
        from fastdeploy_core.plugins.checkpoints import find_model

        asked = {"dtype": arguments.dtype, "quantization": arguments.quantization}
        settings = read_quantization(read_model_config(arguments.model, asked, find_model))
        method, config = settings.method, settings.config
    else:
        config = parse_quantization(arguments.quantization)
        method = str(config.get("quantization", ""))
    if not method:
        return None
    device, library = _place(arguments, inventory, hooks)
    return QuantizationQuestion(name=method, config=config, device=device, tensor_library=library)


def _expert_formats(arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager) -> str:
    """Internal formats of the experts, as the quantizer that would be chosen says."""
    question = _quantization_question(arguments, inventory, hooks)
    if question is None:
        return ""
    answer = hooks.first("fd_quantizer_for", question=question)
    if answer is None or not isinstance(answer.value, Candidate):
        return ""
    return answer.value.details.get("experts", "")


def _quantizer(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    question = _quantization_question(arguments, inventory, hooks)
    if question is None:
        raise ConfigError(
            "nothing asks for a quantizer: add --quantization NAME, or --model DIR of a checkpoint "
            "whose config.json has a quantization_config"
        )
    return [_all_answers("quantizer", "fd_quantizer_for", question, inventory, hooks)]


def _kv_transport(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    from fastdeploy_core.contracts.kv_transport import TransportQuestion

    device, _ = _place(arguments, inventory, hooks)
    question = TransportQuestion(same_host=True, device=device)
    return [_all_answers("kv_transport", "fd_kv_transport_for", question, inventory, hooks)]


def _kernels(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    """Every cell of the device's table and the reference's: used, or why not."""
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.plugins.kernels import build_kernel_table, kernel_facts
    from fastdeploy_core.plugins.negotiate import CandidateRow

    decision, candidates = _ask_device(arguments, inventory, hooks)
    device = arguments.device or decision.winner  # one that is named need not be here
    details = next((c.details for c in candidates if c.name == device), {})
    library = details.get("tensor_library", "")
    find("device", device, inventory)
    facts: dict[str, Any] = {"tensor_library": library}
    if arguments.model:
        model = read_model_config(arguments.model, {"dtype": arguments.dtype})
        facts = kernel_facts(model, library)
    elif arguments.dtype != "auto":
        facts["dtype"] = arguments.dtype
    facts["objective"] = arguments.kernel_objective
    cells = build_kernel_table(device, facts).cells
    rows = [
        CandidateRow(cell.operation, cell.distribution, cell.is_used, 0, cell.reason)
        for cell in sorted(cells, key=lambda c: (c.operation, not c.is_used))
    ]
    own = sum(row.accepted and row.distribution != DISTRIBUTION for row in rows)
    used = sum(row.accepted for row in rows)
    why = f"{own} of {used} operations from plugins, the others from the reference"
    return [Decision("kernels", f"device {device}, {facts}", device, why, rows)]


def _all_answers(
    kind: str, hook: str, question: Any, inventory: Inventory, hooks: HookManager
) -> Decision:
    """A first-result hook asked of everybody, so that the table shows who else would have taken it.
    The engine takes the first that accepts; the order of answers is the order of asking."""
    rows: list[tuple[Candidate, str]] = []
    for given in hooks.ask(hook, question=question):
        if isinstance(given.value, Candidate):
            rows.append((given.value, given.plugin.distribution))
    named = {c.name for c, _ in rows}
    for entry in inventory.of(kind, usable=False):
        if entry.name not in named:
            silent = Decline(entry.reason or "gave no answer; it can be asked for by name")
            rows.append((Candidate(entry.name, silent), entry.distribution))
    return decide(kind, repr(question), rows)


def _parser_of_model(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    """Where none is named, the parser that is named as the model's type."""
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.parsers.answer import parser_for
    from fastdeploy_core.plugins.checkpoints import find_model

    (decision,) = _by_name(arguments, inventory, hooks)
    if not arguments.model:
        return [decision]
    config = read_model_config(arguments.model, {"dtype": arguments.dtype}, find_model).hf_config
    model_type = str(config.get("model_type", ""))
    winner = parser_for(arguments.kind, "", model_type)
    flag = {"tool_parser": "--tool-call-parser"}.get(arguments.kind, "--reasoning-parser")
    why = f"named as the model's type; {flag} names another one or none"
    if not winner:
        why = f"none is named as the model's type, {model_type!r}; {flag} names one"
    return [Decision(decision.kind, f"model_type {model_type!r}", winner, why, decision.candidates)]


def _model(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    """With --model DIR the family of its architecture, as a start finds it; else all there are."""
    (decision,) = _by_name(arguments, inventory, hooks)
    if not arguments.model:
        return [decision]
    from fastdeploy_core.config.model import read_model_config
    from fastdeploy_core.models.shapes import read_shapes
    from fastdeploy_core.plugins.checkpoints import find_model

    model = read_model_config(arguments.model, {"dtype": arguments.dtype}, find_model)
    name = model.architecture
    rows = [row for row in decision.candidates if row.name == name]
    winner, why = "", "config.json says so"
    try:
        find("model", name, inventory)
        read_shapes(model.hf_config, arguments.tensor_parallel_size, model.dtype)
        winner = name
    except FastDeployError as error:
        why = str(error)
    return [Decision("model", f"architecture {name!r} of {arguments.model}", winner, why, rows)]


def _by_name(
    arguments: argparse.Namespace, inventory: Inventory, hooks: HookManager
) -> list[Decision]:
    """Kinds without negotiation: the configuration names the driver."""
    del hooks
    rows: list[tuple[Candidate, str]] = []
    for entry in inventory.entries:
        if entry.kind == arguments.kind:
            usable = not entry.reason
            verdict = Accept(0, "chosen by name only") if usable else Decline(entry.reason)
            rows.append((Candidate(entry.name, verdict), entry.distribution))
    default = {"scheduler": "local"}.get(arguments.kind, "")
    if default:
        return [decide(arguments.kind, "the configuration's default", rows, asked=default)]
    decision = decide(arguments.kind, "chosen by name in the configuration or request", rows)
    why = "any of these, by name" if decision.winner else decision.why
    return [Decision(decision.kind, decision.question, decision.winner, why, decision.candidates)]


def _as_table(decision: Decision) -> str:
    """One question with every candidate's answer."""
    rows = [
        (
            "->" if c.name == decision.winner else "",
            c.name,
            c.distribution,
            "accept" if c.accepted else "decline",
            c.score if c.accepted else "",
            c.reason,
        )
        for c in decision.candidates
    ]
    winner = (
        f"winner: {decision.winner} ({decision.why})"
        if decision.winner
        else (f"no winner: {decision.why}")
    )
    body = table(("", "candidate", "distribution", "answer", "score", "reason"), rows)
    return f"{decision.kind}: {decision.question}\n{body}\n{winner}"


def _as_data(decision: Decision) -> dict[str, Any]:
    """A stable form."""
    return {
        "kind": decision.kind,
        "question": decision.question,
        "winner": decision.winner,
        "why": decision.why,
        "candidates": [
            {
                "name": c.name,
                "distribution": c.distribution,
                "accepted": c.accepted,
                "score": c.score,
                "reason": c.reason,
            }
            for c in decision.candidates
        ],
    }


_EXPLAIN: dict[str, Callable[[argparse.Namespace, Inventory, HookManager], list[Decision]]] = {
    "device": _device,
    "attention": _attention,
    "kernels": _kernels,
    "model": _model,
    "state": _state,
    "moe": _moe,
    "expert_communicator": _expert_communicator,
    "quantizer": _quantizer,
    "kv_transport": _kv_transport,
    "reasoning_parser": _parser_of_model,
    "tool_parser": _parser_of_model,
}
# Kinds in which the next candidate serves where the best one cannot be imported.
_NEGOTIATED = ("device", "attention", "state", "moe", "expert_communicator", "kv_transport")
