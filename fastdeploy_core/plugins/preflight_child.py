"""The child process that imports a plugin before any other process does. preflight.py runs it as a
script.

It reads one JSON document from stdin and writes JSON lines to the file descriptor given as first
argument: {"id", "event": "start"} and then {"id", "event": "done", ...}. If a job hangs, exits or
crashes the process, the parent sees no "done".
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

# Class attributes that drivers declare; `option_docs` maps the driver's own settings to their
# meaning.
_SHOWN = (
    "contract",
    "unit",
    "capabilities",
    "limits",
    "can_capture_decode",
    "can_capture_mixed",
    "norms_heads",
    "features",
    "option_docs",
)


def main() -> None:
    """Do every job in order."""
    channel = int(sys.argv[1])
    order = json.loads(sys.stdin.read())
    sys.path[:] = order["sys_path"]

    def tell(message: dict[str, Any]) -> None:
        os.write(channel, json.dumps(message, default=str).encode() + b"\n")

    for job in order["jobs"]:
        tell({"id": job["id"], "event": "start"})
        started = time.perf_counter()
        result: dict[str, Any] = {"id": job["id"], "event": "done", "error": "", "answers": {}}
        try:
            _do(job, result)
        except BaseException as error:  # SystemExit of a plugin is a failure of that plugin
            result["error"] = describe(error)
        result["ms"] = (time.perf_counter() - started) * 1000
        tell(result)
        if result["error"]:
            break  # its leftovers in this process must not be blamed on the next plugin
    # Threads of a plugin must not keep this process alive.
    os._exit(0)


def describe(error: BaseException) -> str:
    """One line for an error, even if its own __str__ fails."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def _do(job: dict[str, Any], result: dict[str, Any]) -> None:
    import importlib

    module_name, _, attribute = job["target"].partition(":")
    threads = set(threading.enumerate())
    target: Any = importlib.import_module(module_name)
    _check_threads(threads)
    for part in filter(None, attribute.split(".")):
        target = getattr(target, part)
    contract = getattr(target, "contract", None)
    if isinstance(contract, tuple) and all(isinstance(n, int) for n in contract):
        result["contract"] = list(contract)
    features = getattr(target, "features", ())
    if isinstance(features, frozenset | set | tuple | list):
        result["features"] = sorted(map(str, features))
    if job.get("describe"):
        result["facts"] = _facts(target)
    for hook in job.get("calls", []):
        function = getattr(target, hook, None)
        if function is None or not hasattr(function, "fastdeploy_impl"):
            continue
        result["answers"][hook] = _ask(function, hook, job.get("question", {}))


def _check_threads(before: set[threading.Thread]) -> None:
    """A new thread that is no daemon would keep the server from ending."""
    deadline = time.monotonic() + 0.3
    while True:
        left = [t.name for t in threading.enumerate() if not t.daemon and t not in before]
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"importing it leaves threads running: {', '.join(left)}")
        time.sleep(0.01)


def _facts(target: Any) -> dict[str, Any]:
    """The facts for `plugins show`: declared attributes, a table's operations, a module's hooks."""
    import dataclasses
    from collections.abc import Mapping

    if isinstance(target, Mapping):
        missing = _missing_modules(target)
        return {"operations": sorted(map(str, target))} | (
            {"missing modules": missing} if missing else {}
        )
    facts: dict[str, Any] = {}
    summary = (getattr(target, "__doc__", None) or "").strip().splitlines()
    if summary:
        facts["summary"] = summary[0]
    for name in _SHOWN:
        value = getattr(target, name, None)
        if value is None or isinstance(value, property):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            facts[name] = dataclasses.asdict(value)
        elif isinstance(value, frozenset):
            facts[name] = sorted(map(str, value))
        elif isinstance(value, str | int | float | bool | tuple | list | dict):
            facts[name] = value
    hooks = [n for n in dir(target) if hasattr(getattr(target, n, None), "fastdeploy_impl")]
    if hooks:
        facts["hooks"] = hooks
    return facts


def _missing_modules(table: Any) -> dict[str, str]:
    """Operations of a kernel table whose module does not exist; the modules are not imported, for
    that may need hardware."""
    import importlib.util

    missing: dict[str, str] = {}
    for operation, cell in table.items():
        behind = getattr(cell, "behind", {})
        parts = (getattr(cell, name, "") for name in ("target", "predicate", "prepare"))
        targets = [cell] if isinstance(cell, str) else [*parts, *behind.values()]
        for module in (target.partition(":")[0] for target in targets if target):
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                missing[str(operation)] = module
    return missing


def _ask(function: Any, hook: str, question: dict[str, Any]) -> Any:
    import inspect

    arguments: dict[str, Any] = {}
    if hook == "fd_device_probe":
        from fastdeploy_core.contracts.device import DeviceQuestion

        arguments["question"] = DeviceQuestion(**question)
    wanted = inspect.signature(function).parameters
    return _encode(function(**{k: v for k, v in arguments.items() if k in wanted}))


def _encode(value: Any) -> Any:
    """Candidates as objects that preflight.decode_candidate reads; rows as lists."""
    from fastdeploy_core.contracts.base import Accept, Candidate

    if isinstance(value, Candidate):
        verdict = value.verdict
        is_accept = isinstance(verdict, Accept)
        return {
            "candidate": value.name,
            "accept": is_accept,
            "score": verdict.score if isinstance(verdict, Accept) else 0,
            "text": verdict.note if isinstance(verdict, Accept) else verdict.reason,
            "details": {str(k): str(v) for k, v in value.details.items()},
        }
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


if __name__ == "__main__":
    main()
