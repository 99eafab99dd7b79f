"""From a kind and a name to a loaded driver, or to an error that says what to do.

stevedore's DriverManager loads the driver. Discovery decides before which entries may take part,
because stevedore knows neither versions nor the operator's choice.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from fastdeploy_core import envs
from fastdeploy_core.contracts.base import CONTRACT, KINDS, OLDEST_MAJOR
from fastdeploy_core.errors import (
    ContractMismatch,
    PluginConflict,
    PluginError,
    PluginLoadError,
    PluginNotFound,
)

from . import preflight
from .discovery import (
    BROKEN,
    CONTRACT_GROUP,
    DISABLED,
    DUPLICATE,
    INCOMPATIBLE,
    OK,
    Inventory,
    PluginEntry,
    discover,
)
from .known import providers
from .preflight import Job, Outcome
from .preflight import outcomes_of as _outcomes
from .preflight_child import describe

logger = logging.getLogger(__name__)

_ERROR_OF_STATUS: Final[dict[str, type[PluginError]]] = {
    DISABLED: PluginNotFound,
    DUPLICATE: PluginConflict,
    CONTRACT_GROUP: ContractMismatch,
    INCOMPATIBLE: ContractMismatch,
}
# Kinds whose names also come from a hook, for plugins that provide many of them.
REGISTER_HOOKS: Final[dict[str, str]] = {
    "model": "fd_register_models",
    "reasoning_parser": "fd_register_reasoning_parsers",
    "tool_parser": "fd_register_tool_parsers",
    "logits_processor": "fd_register_logits_processors",
    "grammar": "fd_register_grammars",
}


def find(kind: str, name: str, inventory: Inventory | None = None) -> PluginEntry:
    """The one usable entry of that kind and name; imports nothing for entry points."""
    inventory = discover() if inventory is None else inventory
    if kind not in KINDS:
        raise PluginNotFound(f"no kind of plugin {kind!r}; there are: {', '.join(KINDS)}")
    entries = inventory.named(kind, name)
    usable = [e for e in entries if e.status == OK]
    if usable:
        return usable[0]
    if entries:
        entry = entries[0]
        raise _ERROR_OF_STATUS.get(entry.status, PluginError)(
            f"{_title(kind)} {name!r} of {entry.origin} is not used ({entry.status}): "
            f"{entry.reason}; see: fastdeploy plugins list"
        )
    registered = _registered(kind, inventory).get(name)
    if registered is not None:
        return registered
    raise PluginNotFound(_not_found(kind, name, inventory))


def find_soon(kind: str, name: str, inventory: Inventory | None = None) -> PluginEntry:
    """The same for what is loaded later: the next child process that imports plugins tries it."""
    entry = find(kind, name, inventory)
    import_soon([entry])
    return entry


def find_part(name: str, asked: str, inventory: Inventory | None = None) -> PluginEntry:
    """A part of the core in a distribution of its own. Several processes: `engines` (config,
    resolved plugins, listener), `api-servers` (both configurations, plugins, listener), `experts`
    (config, device, rank, communicator, maker of an ExpertCommunicator). What is shared with
    others: KV blocks (`kv-events`, `kv-store`: engine/core.py), requests (`shared-queue`:
    client.py), weights with later starts (`weight-cache`: loading/loader.py). Adapters of layers
    (`lora`: layers/builder.py) and requests (`lora-request`: api/, `lora-server`: serving/). What
    puts engines to sleep (`rollout-engine`, `rollout-worker`, `rollout-llm`: client.py,
    engine_process.py, worker_process.py). `forced-tools`: calls that a grammar forces.
    `thinking-budget`: a logits processor. `beam-llm`, `beam-sampling`: beam search.
    `request-templates`: renders chat templates that requests bring (serving/state.py).
    `pooled-invocations`: a route. asked: the arguments that need it."""
    try:
        return find("part", name, inventory)
    except PluginNotFound as error:
        raise PluginNotFound(f"{asked} needs a plugin: {error}") from None


def part(name: str, asked: str) -> Any:
    """The same, loaded. The operator asked for it, and it is a distribution of the core's own: no
    child process tries the import first."""
    return load(find_part(name, asked), preflight=False)


def available(kind: str, inventory: Inventory | None = None) -> list[str]:
    """Every usable name of a kind, sorted."""
    inventory = discover() if inventory is None else inventory
    return sorted({e.name for e in inventory.of(kind)} | set(_registered(kind, inventory)))


def lookup(kind: str, name: str, *, inventory: Inventory | None = None) -> Any:
    """Find and load; see fastdeploy_core.plugins.lookup."""
    return load(find(kind, name, inventory))


def load(entry: PluginEntry, *, preflight: bool = True) -> Any:
    """Import a driver's target and check the contract that it declares.

    A third party's target is first imported in a child process (see preflight.py), unless the
    caller did so.
    """
    if preflight and not entry.is_core:
        check_import(entry)
    try:
        driver = _import_with_stevedore(entry)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginLoadError(
            f"{_title(entry.kind)} {entry.name!r} of {entry.origin} failed to load: "
            f"{describe(error)}; see: fastdeploy plugins doctor"
        ) from error
    if entry.kind in KINDS and KINDS[entry.kind].versioned:
        check_contract(entry, getattr(driver, "contract", None))
    return driver


def check_import(entry: PluginEntry) -> None:
    """Import the target in a child process; raises load()'s errors, also for hangs and exits."""
    for error in broken([entry]).values():
        raise error


def broken(entries: Sequence[PluginEntry]) -> dict[PluginEntry, PluginError]:
    """Those that cannot be used, with load()'s errors: all are imported in a child process."""
    results = _preflight(entries)
    found: dict[PluginEntry, PluginError] = {}
    for entry, outcome in zip(entries, results, strict=True):
        if outcome.error:
            found[entry] = PluginLoadError(
                f"{_title(entry.kind)} {entry.name!r} of {entry.origin} failed to load: "
                f"{outcome.error}; see: fastdeploy plugins doctor"
            )
            continue
        kind = KINDS.get(entry.kind)
        if kind is not None and kind.versioned and envs.read("FD_PLUGIN_PREFLIGHT"):
            try:
                check_contract(entry, outcome.contract)
            except ContractMismatch as error:
                found[entry] = error
    return found


def without_broken(inventory: Inventory, entries: Sequence[PluginEntry]) -> Inventory:
    """The inventory in which those of the entries that cannot be used say so, so that the next
    candidate is chosen; the same one where all can."""
    errors = broken([entry for entry in entries if not entry.is_core])
    if not errors:
        return inventory
    changed = tuple(
        replace(e, status=BROKEN, reason=f"cannot be used: {errors[e]}") if e in errors else e
        for e in inventory.entries
    )
    return replace(inventory, entries=changed)


def features(entry: PluginEntry) -> frozenset[str]:
    """What a driver of layers declares to implement beyond the plain layer; a stranger's class is
    looked at in a child process. PluginLoadError where it cannot be imported."""
    if entry.is_core or not envs.read("FD_PLUGIN_PREFLIGHT"):
        return frozenset(getattr(load(entry, preflight=False), "features", ()))
    check_import(entry)
    return _preflight([entry])[0].features


def check_contract(entry: PluginEntry, contract: object) -> None:
    """Raise ContractMismatch unless this core serves the (major, minor) a driver declares."""
    what = f"{_title(entry.kind)} {entry.name!r} of {entry.origin}"
    here = f"{CONTRACT[0]}.{CONTRACT[1]}"
    if not (
        isinstance(contract, tuple)
        and len(contract) == 2
        and all(isinstance(n, int) for n in contract)
    ):
        raise ContractMismatch(
            f"{what} declares no contract; got {contract!r:.60}; this core speaks {here}: "
            f"add `contract = {CONTRACT}` to the driver"
        )
    major, minor = contract
    written = f"{what} was written for contract {major}.{minor}; this core speaks {here}"
    if major > CONTRACT[0]:
        raise ContractMismatch(
            f"{written}: upgrade fastdeploy-core or install an older release of the plugin"
        )
    if major < OLDEST_MAJOR:
        older = f" and {OLDEST_MAJOR}.x" if CONTRACT[0] > OLDEST_MAJOR else ""
        raise ContractMismatch(f"{written}{older}: install a newer release of the plugin")
    if major == CONTRACT[0] and minor > CONTRACT[1]:
        logger.warning("%s, which may lack what it uses: upgrade fastdeploy-core", written)


def _preflight(entries: Sequence[PluginEntry]) -> list[Outcome]:
    """What became of importing each; a target is imported once."""
    if not envs.read("FD_PLUGIN_PREFLIGHT"):
        return [Outcome("", 0.0)] * len(entries)
    import_soon(entries)
    if preflight.waiting:
        logger.debug("importing %s in a child process first", ", ".join(preflight.waiting))
        preflight.run([])
    return [_outcomes[entry.target] for entry in entries]


def import_soon(entries: Iterable[PluginEntry]) -> None:
    """The next child process imports those of these that none has yet; none of the core's."""
    limit_s = envs.read("FD_PLUGIN_DRIVER_TIMEOUT_S")
    strangers = (e for e in entries if not e.is_core and e.target not in _outcomes)
    new = {e.target: e.distribution for e in strangers}
    preflight.waiting.update((t, Job(t, limit_s, group=owner)) for t, owner in new.items())


def _import_with_stevedore(entry: PluginEntry) -> Any:
    from stevedore.driver import DriverManager

    class OneEntry(DriverManager[Any]):
        """A view of only the entry that discovery chose, without stevedore's own cache on disk."""

        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [importlib.metadata.EntryPoint(entry.name, entry.target, entry.group)]

    return OneEntry(namespace=entry.group, name=entry.name).driver


def _registered(kind: str, inventory: Inventory) -> dict[str, PluginEntry]:
    """Names that plugins registered through a hook, as if they were entry points."""
    hook = REGISTER_HOOKS.get(kind)
    if hook is None:
        return {}
    from .manager import hook_manager

    found: dict[str, PluginEntry] = {}
    conflicts: dict[str, set[str]] = {}
    manager = hook_manager(inventory=inventory)
    for answer in manager.ask(hook):
        if not isinstance(answer.value, dict):
            manager.complain(
                answer.plugin, hook, f"returned {type(answer.value).__name__}, not a dict"
            )
            continue
        for name, target in answer.value.items():
            conflicts.setdefault(name, set()).add(answer.plugin.origin)
            found[name] = PluginEntry(
                kind=kind,
                name=str(name),
                group=KINDS[kind].group,
                target=str(target),
                distribution=answer.plugin.distribution,
                version=answer.plugin.version,
            )
    taken = {e.name for e in inventory.of(kind)}
    for name, origins in conflicts.items():
        if name in taken or len(origins) > 1:
            logger.warning(
                "%s %r is registered by %s but taken already; that registration is ignored",
                _title(kind),
                name,
                " and ".join(sorted(origins)),
            )
            del found[name]
    return found


def _not_found(kind: str, name: str, inventory: Inventory) -> str:
    installed = available(kind, inventory)
    text = f"no {_title(kind)} {name!r}; installed: {', '.join(installed) or 'none'}"
    provider = providers(kind).get(name)
    if provider:
        return f"{text}; provided by: {provider} (pip install {provider})"
    if not inventory.entries:
        return f"{text}; fastdeploy-core itself is not installed: pip install fastdeploy-core"
    import difflib

    close = difflib.get_close_matches(name, installed, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{text}; {hint}see: fastdeploy plugins list --kind {kind}"


def _title(kind: str) -> str:
    return f"{kind.replace('_', ' ')} driver" if KINDS[kind].versioned else kind.replace("_", " ")
