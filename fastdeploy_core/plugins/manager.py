"""The hook manager: pluggy for markers, validation and order; one guarded call per plugin.

A hook module that cannot be imported, names unknown hooks, raises or hangs is reported by its
distribution and left out; the others continue. Answers carry the plugin that they came from.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pluggy

from fastdeploy_core import envs
from fastdeploy_core.contracts import hookspecs
from fastdeploy_core.contracts.base import Candidate
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.errors import PluginError, PluginLoadError

from . import preflight
from .discovery import HOOKS, Inventory, PluginEntry, discover
from .preflight_child import activity, describe

if TYPE_CHECKING:
    from .resolve import ResolvedPlugins

logger = logging.getLogger(__name__)

_MAX_STRIKES: Final = 3
_LEAST_S: Final = 0.2  # what every answer may take, however many others hang
_MOST_TURNS: Final = 60  # half limits that one answer may take, if it does not hang
_PROBE: Final = "fd_device_probe"
_ADVICE: Final = "; see: fastdeploy plugins doctor"
# Events that fire while requests run: called directly, because a thread with a time limit costs too
# much.
_HOT_EVENTS: Final = frozenset({"fd_request_finished", "fd_step_stats"})

_shared: dict[tuple[PluginEntry, ...], HookManager] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """The value that one plugin returned."""

    plugin: PluginEntry
    value: Any


class HookManager:
    """Hook modules of one process. Build it with hook_manager()."""

    def __init__(
        self, entries: Sequence[PluginEntry], *, trusted: bool = False, tensor_library: str = ""
    ) -> None:
        """Load the modules of `entries`; `trusted` ones were imported by a pre-flight check before.
        That check asks for devices on `tensor_library`, too, so that one child process answers."""
        self.faults: list[tuple[PluginEntry, str]] = []
        self.plugins: dict[str, PluginEntry] = {}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._has_preflight = envs.read("FD_PLUGIN_PREFLIGHT")
        self._trace = envs.read("FD_TRACE_PLUGINS")
        self._limit_s = envs.read("FD_PLUGIN_HOOK_TIMEOUT_S")
        self._left_s = self._limit_s / 2  # what all answers that hang may take together
        self._strikes: Counter[tuple[str, str]] = Counter()
        self._probes: dict[tuple[str, str], preflight.Outcome] = {}
        # pluggy calls the last registered plugin first. Registering the core first and the others
        # in reverse order makes every process ask third parties in alphabetical order and the core
        # last.
        order = sorted(entries, key=lambda e: (not e.is_core, e.distribution, e.name))
        cores = [e for e in order if e.is_core]
        others = [e for e in order if not e.is_core]
        refused = set() if trusted else self._preflight(others, DeviceQuestion(tensor_library))
        for entry in [*cores, *reversed(others)]:
            if entry not in refused:
                self._load(entry)

    @property
    def entries(self) -> list[PluginEntry]:
        """The hook modules that are loaded, in the order they are asked."""
        return list(reversed(self.plugins.values()))

    @property
    def problems(self) -> list[str]:
        """What plugins did wrong so far, in sentences."""
        return [f"{text}{_ADVICE}" for _, text in self.faults]

    def hooks_of(self, entry: PluginEntry) -> list[str]:
        """Names of the hooks a loaded plugin implements."""
        plugin = self._manager.get_plugin(_key(entry))
        callers = self._manager.get_hookcallers(plugin) if plugin is not None else None
        return sorted(c.name for c in callers or [])

    def ask(self, hook: str, *, unasked: Collection[str] = (), **arguments: Any) -> list[Answer]:
        """Every plugin's answer, in order; None and failures are left out, and so are the
        distributions named in `unasked`."""
        answers = []
        for plugin, implementation in self._implementations(hook):
            if plugin.distribution in unasked:
                continue
            value = self._call(plugin, hook, implementation, arguments)
            if value is not None:
                answers.append(Answer(plugin, value))
        return answers

    def first(self, hook: str, **arguments: Any) -> Answer | None:
        """The first answer that is not None."""
        for plugin, implementation in self._implementations(hook):
            value = self._call(plugin, hook, implementation, arguments)
            if value is not None:
                return Answer(plugin, value)
        return None

    def notify(self, hook: str, **arguments: Any) -> None:
        """Tell every plugin that something happened."""
        self.ask(hook, **arguments)

    def complain(self, plugin: PluginEntry, hook: str, what: str) -> None:
        """Record and log an error of a plugin."""
        self._record(plugin, f"hook {hook} of {plugin.origin} {what}")

    def _preflight(
        self, others: Sequence[PluginEntry], question: DeviceQuestion
    ) -> set[PluginEntry]:
        """Import third parties' modules in a child process first. Their device probes are also
        answered there, because processes hang or crash when they open hardware."""
        if not others or not self._has_preflight:
            return set()
        refused = set()
        outcomes = self._probe_all(others, question)
        for entry, outcome in zip(others, outcomes, strict=True):
            if outcome.error:
                self._refuse(entry, outcome.error)
                refused.add(entry)
            else:
                self._probes[_key(entry), repr(question)] = outcome
        return refused

    def _probe_all(
        self, entries: Sequence[PluginEntry], question: DeviceQuestion
    ) -> list[preflight.Outcome]:
        asked = {"tensor_library": question.tensor_library}
        longest, stall_s = envs.read("FD_PLUGIN_DRIVER_TIMEOUT_S"), self._limit_s
        jobs = [preflight.Job(e.target, longest, (_PROBE,), asked, stall_s) for e in entries]
        return preflight.run(jobs, at_once=len(jobs))

    def _probe(self, entry: PluginEntry, question: DeviceQuestion) -> Candidate | None:
        """A third party's answer to a device question, from a child process."""
        key = (_key(entry), repr(question))
        if key not in self._probes:
            # All of them will be asked; one child process answers for all.
            others = [e for e in self.plugins.values() if not e.is_core]
            outcomes = self._probe_all(others, question)
            for other, outcome in zip(others, outcomes, strict=True):
                self._probes[_key(other), repr(question)] = outcome
        outcome = self._probes[key]
        if outcome.error:
            raise PluginLoadError(outcome.error)
        answer = outcome.answers.get(_PROBE)
        candidate = preflight.decode_candidate(answer)
        if candidate is None and answer is not None:
            raise PluginError(f"returned {answer!r:.80}, not a Candidate")
        return candidate

    def _refuse(self, entry: PluginEntry, reason: str) -> None:
        self._record(entry, f"hooks {entry.name!r} of {entry.origin} are left out: {reason}")

    def _record(self, plugin: PluginEntry, text: str) -> None:
        self.faults.append((plugin, text))
        logger.warning("%s%s", text, _ADVICE)

    def _load(self, entry: PluginEntry) -> None:
        """Import and register one module; after a failure nothing of it stays registered."""
        key = _key(entry)
        try:
            module: Any = importlib.import_module(entry.module)
            for part in filter(None, entry.target.partition(":")[2].split(".")):
                module = getattr(module, part)
            self._manager.register(self._valid_hooks(entry, module), key)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._manager.has_plugin(key):
                self._manager.unregister(name=key)
            self._refuse(entry, describe(error))
            return
        self.plugins[key] = entry

    def _valid_hooks(self, entry: PluginEntry, module: Any) -> types.SimpleNamespace:
        """The module's hook implementations that pluggy accepts; the others are reported."""
        valid = types.SimpleNamespace()
        for name in dir(module):
            options = self._manager.parse_hookimpl_opts(module, name)
            if options is None:
                continue
            hook = options.get("specname") or name
            problem = self._hook_problem(hook, getattr(module, name), options)
            if problem:
                self.complain(entry, hook, f"is skipped: {problem}")
            else:
                setattr(valid, name, getattr(module, name))
        return valid

    def _hook_problem(self, hook: str, function: Any, options: Any) -> str:
        caller = getattr(self._manager.hook, hook, None)
        if caller is None or not caller.has_spec():
            near = difflib.get_close_matches(hook, hook_names(), n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/reference/hooks.md lists them"
            return f"this core has no such hook; {hint}"
        if options.get("wrapper") or options.get("hookwrapper"):
            return "wrappers are not supported, since one plugin may not change another's answer"
        extra = set(inspect.signature(function).parameters) - set(caller.spec.argnames)
        if extra:
            return (
                f"it wants {', '.join(sorted(extra))}, the hook has "
                f"{', '.join(caller.spec.argnames) or 'no arguments'}"
            )
        return ""

    def _implementations(self, hook: str) -> list[tuple[PluginEntry, pluggy.HookImpl]]:
        caller = getattr(self._manager.hook, hook, None)
        if caller is None or not caller.has_spec():
            raise PluginError(f"no hook {hook!r}; there are: {', '.join(sorted(hook_names()))}")
        return [
            (self.plugins[i.plugin_name], i)
            for i in reversed(caller.get_hookimpls())
            if i.plugin_name in self.plugins
        ]

    def _call(
        self,
        plugin: PluginEntry,
        hook: str,
        implementation: pluggy.HookImpl,
        arguments: dict[str, Any],
    ) -> Any:
        """One plugin's answer. Failures are counted and logged; the third disables its hook."""
        key = (_key(plugin), hook)
        if self._strikes[key] >= _MAX_STRIKES:
            return None
        started = time.perf_counter()
        value, problem = None, ""
        call = functools.partial(
            implementation.function, *[arguments.get(a) for a in implementation.argnames]
        )
        try:
            if plugin.is_core or hook in _HOT_EVENTS:
                value = call()
            elif hook == _PROBE and self._has_preflight:
                value = self._probe(plugin, arguments["question"])
            else:
                value = call_with_limit(call, max(self._left_s, _LEAST_S))
        except KeyboardInterrupt:
            raise
        except TimeoutError as error:
            problem = describe(error)
            self._left_s -= time.perf_counter() - started
            self._strikes[key] = _MAX_STRIKES - 1  # it would hang again
        except BaseException as error:
            problem = describe(error)
        if self._trace:
            milliseconds = (time.perf_counter() - started) * 1000
            result = f"raised {problem}" if problem else f"-> {value!r:.300}"
            shown = ", ".join(f"{k}={v!r:.200}" for k, v in arguments.items())
            sys.stderr.write(
                f"fd-trace {hook}({shown}) {plugin.origin} {result} in {milliseconds:.2f} ms\n"
            )
        if problem:
            self._strikes[key] += 1
            silenced = self._strikes[key] >= _MAX_STRIKES
            self.complain(
                plugin,
                hook,
                f"failed: {problem}" + (", it is not called again" if silenced else ""),
            )
        return value


def hook_manager(
    resolved: ResolvedPlugins | None = None,
    *,
    inventory: Inventory | None = None,
    tensor_library: str = "",
) -> HookManager:
    """The hook modules that were resolved in the parent process, or else all installed ones.
    `tensor_library`: which one devices will be asked about."""
    if resolved is not None:
        return HookManager(resolved.plugin_entries(HOOKS), trusted=True)
    inventory = discover() if inventory is None else inventory
    return shared_manager(tuple(inventory.of(HOOKS)), tensor_library)


def shared_manager(entries: tuple[PluginEntry, ...], tensor_library: str = "") -> HookManager:
    """One manager of these modules in this process, so that the pre-flight check runs once."""
    if entries not in _shared:
        _shared[entries] = HookManager(entries, tensor_library=tensor_library)
    return _shared[entries]


def forget_managers() -> None:
    """Modules are checked and loaded again when they are next asked for."""
    _shared.clear()


def hook_names() -> list[str]:
    """Every hook of the contract, in the order of the file."""
    return [n for n in vars(hookspecs) if n.startswith("fd_")]


def call_with_limit(call: Any, limit_s: float) -> Any:
    """Run `call` in a thread and give up after `limit_s`, unless it goes on reading files or
    touching new memory, as an import does, or gets no processor; the thread then goes on.

    Python cannot end a thread, so a plugin that hangs here costs one idle thread.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="fd-plugin-call", daemon=True)
    thread.start()
    had, seen = 0.0, 0
    for turn in range(_MOST_TURNS):
        began_s = time.monotonic()
        thread.join(limit_s / 2)
        runs, seconds, grown = activity(f"self/task/{thread.native_id}")
        waits = (runs and seconds == had) or time.monotonic() - began_s > limit_s  # for a processor
        if not thread.is_alive() or (turn and grown == seen and not waits):
            break
        had, seen = seconds, grown
    if thread.is_alive():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(outcome.get("error"), KeyboardInterrupt):
        raise RuntimeError("raised KeyboardInterrupt, which is not the user's")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _key(entry: PluginEntry) -> str:
    return f"{entry.distribution}:{entry.name}"
