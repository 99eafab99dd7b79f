"""What an engine is asked to do between steps: pause, resume, sleep, wake up, take new weights.

One action at a time, in the order in which they came, on the thread that runs the steps: an action
therefore begins when no step is in flight. A pause lets the steps in flight end first, and what
`mode` says of the requests:

    wait   no request is begun; those that have begun are answered
    abort  all end with what they have, finish_reason "abort", also those that wait
    keep   they stay as they are and go on later

New weights never meet what was computed with old ones: cached prefixes are forgotten, on the device
and in host memory, and requests that were kept run again from their prompts; those that have given
a token already end with "abort", since nobody can take a token back.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import RequestStatus, branch_id

if TYPE_CHECKING:
    from fastdeploy_core.engine.core import EngineCore

logger = logging.getLogger(__name__)

MODES: Final = ("abort", "wait", "keep")
TAGS: Final = ("weights", "kv_cache")
_ALIASES: Final = {"weight": "weights"}  # FastDeploy 2.x's spelling
# Which action ends the pause that one begins which nobody has asked for.
_RESUMES: Final = {"sleep": "wake_up", "update_weights": "update_weights"}
MAX_ANSWERS: Final = 64  # of actions that are remembered
_BEAT_S: Final = 1.0
_FIXED: Final = ("folder", "checkpoint")  # sources that can be read again

State = Literal["running", "pausing", "paused", "asleep", "broken"]
Action = dict[str, Any]
Answer = dict[str, Any]


class WrongState(Exception):
    """The action is impossible now, and the state would have to change first."""


class EngineControl:
    """Part `rollout-engine`. `put`, `wait` and `state` are called by any thread, `tick` by the one
    that runs the steps. queue: the request scheduler, None where requests wait nowhere else.
    show_life: tells the watchdog that this thread is at work."""

    def __init__(
        self,
        core: EngineCore,
        queue_before: Any = None,
        show_life: Callable[[], None] | None = None,
    ) -> None:
        self._core, self._queue, self._show_life = core, queue_before, show_life
        self._epoch = secrets.token_hex(8)
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._state: State = "running"
        self._pausing: Action | None = None  # what waits until the engine is paused
        self._resume_after = ""  # the action that ends a pause which nobody asked for
        self._asleep: set[str] = set()
        self._version = ""
        self._num_updates = 0
        self._is_empty = False  # the weights sleep at level 2: they are nowhere but in their source
        self._source: Action = {"source": "checkpoint", "options": {}, "version": ""}

    # -- for any thread ---------------------------------------------------------------------------

    def put(self, action: Action) -> None:
        """Queue an action: `id`, `do`, and what that takes."""
        self._actions.put(action)
        self._wake.set()

    def wait(self, timeout_s: float) -> None:
        """Return when an action comes, or later."""
        self._wake.wait(timeout_s)

    def state(self) -> str:
        """The state and the newest answers, as JSON."""
        with self._lock:
            return json.dumps(
                {
                    "epoch": self._epoch,
                    "state": self._state,
                    "asleep": sorted(self._asleep),
                    "weight_version": self._version,
                    "num_updates": self._num_updates,
                    "done": self._answers,
                }
            )

    # -- for the thread of the steps -------------------------------------------------------------

    def tick(self) -> None:
        """Go on with a pause, or begin the next action."""
        self._wake.clear()
        if self._pausing is None and not self._actions.empty():
            self._begin(self._actions.get())
        if self._pausing is not None:
            self._go_on(self._pausing)
        if not self._actions.empty():
            self._wake.set()

    def _begin(self, action: Action) -> None:
        if self._state == "running" and _mode_of(action):
            try:
                mode = _checked_mode(action)
            except InvalidRequest as error:
                self._answer(action, {"error": str(error), "status": 400})
                return
            logger.info("%s: pausing (%s)", action["do"], mode)
            self._core.admits = mode == "abort" and self._queue is not None
            self._core.is_held = mode == "keep"
            self._resume_after = _RESUMES.get(action["do"], "")
            self._set("pausing")
            self._pausing = action
            return
        self._finish(action)

    def _go_on(self, action: Action) -> None:
        if _mode_of(action) == "abort":
            self._end_all()
            if getattr(self._queue, "num_queued", 0):
                return
        if self._core.has_work():
            return
        self._core.admits, self._core.is_held = False, True
        self._pausing = None
        self._set("paused")
        self._finish(action)

    def _finish(self, action: Action) -> None:
        """The engine is as the action needs it, or will not be."""
        do: Callable[[Action], Answer] = getattr(self, f"_{action['do']}")
        try:
            with self._alive():
                answer = do(action)
        except WrongState as error:
            answer = {"error": str(error), "status": 409}
        except (ConfigError, InvalidRequest) as error:
            answer = {"error": str(error), "status": 400}
        except _WorkersFailed as error:
            answer = {"error": str(error), "status": 400}
        has_failed = "error" in answer and _RESUMES.get(action["do"]) == self._resume_after
        if self._state == "paused" and (has_failed or action["do"] == self._resume_after):
            self._run()
        self._answer(action, answer if "error" in answer else {"status": self._state, **answer})

    def _pause(self, action: Action) -> Answer:
        self._resume_after = ""
        if action.get("clear_cache", True) and self._state != "asleep":
            self._forget(new_weights=False)
        return {"num_steps": self._core.stats().steps_total}

    def _resume(self, action: Action) -> Answer:
        if self._state in ("asleep", "broken"):
            way = "wake_up" if self._state == "asleep" else "update_weights"
            raise WrongState(f"the engine is {self._state}; {way} comes before resume")
        self._run()
        return {}

    def _sleep(self, action: Action) -> Answer:
        level, tags = action.get("level", 1), _tags(action)
        if level not in (0, 1, 2) or isinstance(level, bool):
            raise InvalidRequest(f"level must be 0, 1 or 2, got {level!r:.40}", param="level")
        if level == 2 and self._source["source"] not in _FIXED:
            raise WrongState(
                f"the weights came from source {self._source['source']!r}, which cannot be read "
                "again: sleep at level 1, which keeps them in host memory"
            )
        wanted = [tag for tag in tags if tag not in self._asleep] if level else []
        freed = 0
        if wanted:
            self._forget(new_weights=False)
            answers = self._workers({"do": "sleep", "tags": wanted, "level": level})
            freed = sum(answer["freed_bytes"] for answer in answers)
            self._is_empty |= level == 2 and "weights" in wanted
            with self._lock:
                self._asleep |= set(wanted)
            self._set("asleep")
        return {"level": level, "freed_bytes": freed}

    def _wake_up(self, action: Action) -> Answer:
        wanted = [tag for tag in _tags(action) if tag in self._asleep]
        if wanted:
            self._workers({"do": "wake_up", "tags": wanted})
            with self._lock:
                self._asleep -= set(wanted)
            if not self._asleep:
                self._set("paused")
            if "weights" in wanted and self._is_empty:
                self._replace(self._source)
        return {"asleep": sorted(self._asleep)}

    def _update_weights(self, action: Action) -> Answer:
        if "weights" in self._asleep:
            raise WrongState('the weights sleep; wake_up with tags ["weights"] comes first')
        version = action.get("version") or str(self._num_updates + 1)
        source = {"source": action["source"], "options": action.get("options") or {}}
        num_bytes = self._replace({**source, "version": version})
        with self._lock:
            self._version = version
            self._num_updates += 1
        if self._state == "broken":
            self._set("asleep" if self._asleep else "paused")
        logger.info("weights %s are in place: %d bytes", version, num_bytes)
        return {"weight_version": version, "num_bytes": num_bytes}

    def _replace(self, source: Action) -> int:
        """Weights of this source in place of those there are, or none of them. Returns bytes."""
        self._forget(new_weights=True)
        try:
            self._workers({"do": "prepare", **source})
        except _WorkersFailed:
            self._workers({"do": "drop"})
            if self._is_empty:
                self._set("broken")
            raise
        try:
            answers = self._workers({"do": "commit"})
        except _WorkersFailed:
            self._set("broken")
            raise
        self._source, self._is_empty = source, False
        return sum(answer["num_bytes"] for answer in answers)

    def _reset_prefix_cache(self, action: Action) -> Answer:
        return {"reset": self._core.reset_prefix_cache()}

    # -- helpers ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._core.admits, self._core.is_held = True, False
        self._resume_after = ""
        self._set("running")

    def _set(self, state: State) -> None:
        with self._lock:
            self._state = state

    def _answer(self, action: Action, answer: Answer) -> None:
        if "error" in answer:
            logger.warning("%s: %s", action["do"], answer["error"])
        with self._lock:
            self._answers = {**self._answers, action["id"]: answer}
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]

    def _workers(self, action: Action) -> list[Answer]:
        answers = self._core.control_workers(action)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise _WorkersFailed(errors[0])
        return answers

    def _end_all(self) -> None:
        scheduler = self._core.scheduler
        for request in list(scheduler.roster.requests.values()):
            names = [branch_id(request.request_id, seq.index) for seq in request.sequences]
            scheduler.abort(names)

    def _forget(self, *, new_weights: bool) -> None:
        """Nothing that was computed is used again. With new weights, requests that have given a
        token end."""
        scheduler = self._core.scheduler
        for request in list(scheduler.roster.requests.values()):
            if new_weights and any(seq.num_output_tokens for seq in request.sequences):
                scheduler.abort(
                    [branch_id(request.request_id, seq.index) for seq in request.sequences]
                )
                continue
            if request.prompt_logprobs is not None:
                request.prompt_logprobs = [None]
            for seq in request.sequences:
                if seq.status is RequestStatus.RUNNING:
                    scheduler.roster.preempt(seq)
        scheduler.kv.clear_cache()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Workers may be at work for longer than a step takes, as at the start."""
        show_life = self._show_life
        if show_life is None:
            yield
            return
        done = threading.Event()
        most = int(self._core.config.watchdog.startup_timeout_s / _BEAT_S)

        def beat() -> None:
            for _ in range(most):
                if done.wait(_BEAT_S):
                    return
                show_life()

        thread = threading.Thread(target=beat, name="fd-rollout-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _WorkersFailed(Exception):
    """A rank could not do it; the message is for the operator."""


def _mode_of(action: Action) -> str:
    """How requests are treated where the action needs a pause; empty: it needs none."""
    defaults = {"pause": "abort", "sleep": "abort", "update_weights": "wait"}
    default = defaults.get(action["do"], "")
    return str(action.get("mode") or default) if default else ""


def _checked_mode(action: Action) -> str:
    mode = _mode_of(action)
    if mode not in MODES:
        raise InvalidRequest(f"mode must be {', '.join(MODES)}; got {mode!r:.40}", param="mode")
    return mode


def _tags(action: Action) -> list[str]:
    """What is meant: named tags, or everything."""
    given = action.get("tags") or list(TAGS)
    named = [_ALIASES.get(tag, tag) for tag in given]
    if unknown := [tag for tag in named if tag not in TAGS]:
        raise InvalidRequest(
            f"tags has {unknown[0]!r:.40}; possible: {', '.join(TAGS)}", param="tags"
        )
    return named
