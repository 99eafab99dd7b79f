"""Methods of LLM(enable_rollout=True): pause, resume, sleep, wake_up, update_weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from fastdeploy_core.errors import ConfigError, FastDeployError

if TYPE_CHECKING:
    from fastdeploy_core.api.llm import LLM


def pause(llm: LLM, mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
    """Stop between two steps; see control.py for `mode`."""
    return _do(llm, "pause", mode=mode, clear_cache=clear_cache)


def resume(llm: LLM) -> dict[str, Any]:
    """Go on after `pause`."""
    return _do(llm, "resume")


def sleep(
    llm: LLM, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None
) -> dict[str, Any]:
    """Give the device's memory back: 1 keeps the weights in host memory, 2 nowhere but in their
    source, 0 only pauses. `tags`: of "weights" and "kv_cache", both by default."""
    return _do(llm, "sleep", level=level, mode=mode, tags=None if tags is None else list(tags))


def wake_up(llm: LLM, tags: Sequence[str] | None = None) -> dict[str, Any]:
    """Take the memory again; resumes what `sleep` has paused once nothing sleeps."""
    return _do(llm, "wake_up", tags=None if tags is None else list(tags))


def is_sleeping(llm: LLM) -> bool:
    """Whether weights or KV caches have no memory."""
    return bool(_state(llm)["asleep"])


def weight_version(llm: LLM) -> str:
    """What the weights are called; empty for those of the start."""
    return str(_state(llm)["weight_version"])


def update_weights(
    llm: LLM,
    path: str | None = None,
    *,
    source: str = "folder",
    options: Mapping[str, Any] | None = None,
    version: str = "",
    mode: str = "wait",
) -> dict[str, Any]:
    """Put new weights in the place of the old ones: *.safetensors in the folder `path`, or what
    another source gives with `options`. They stay as they are if that fails."""
    options = dict(options or ({} if path is None else {"path": path}))
    asked = {"source": source, "options": options, "version": version, "mode": mode}
    return _do(llm, "update_weights", **asked)


METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    method.__name__: method
    for method in (pause, resume, sleep, wake_up, is_sleeping, weight_version, update_weights)
}


def _state(llm: LLM) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(llm._live_engine().control.state())
    return state


def _do(llm: LLM, name: str, **options: Any) -> dict[str, Any]:
    """Steps of the engine until the action is done; answers that end meanwhile go to the calls that
    wait for them."""
    engine, ident = llm._live_engine(), uuid4().hex
    engine.control.put({"id": ident, "do": name, **options})
    while True:
        engine.control.tick()
        answer: dict[str, Any] | None = _state(llm)["done"].get(ident)
        if answer is None:
            llm._step(engine)
            continue
        if "error" not in answer:
            return answer
        kind = ConfigError if answer["status"] in (400, 409) else FastDeployError
        raise kind(answer["error"])
