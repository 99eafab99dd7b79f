"""Resolves plugins in a thread, because that takes time. Other processes start meanwhile and get
the result when it is there."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.plugins.resolved import ResolvedPlugins


class Plugins:
    """`resolved`: the chosen plugins, or the error of choosing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.resolved: Future[ResolvedPlugins] = Future()
        # a waiter that gives up must not cancel the resolution
        self.resolved.set_running_or_notify_cancel()
        threading.Thread(target=self._ask, name="fd-plugins", daemon=True).start()

    def _ask(self) -> None:
        try:
            self.resolved.set_result(resolve_plugins(self._config))
        except BaseException as error:
            self.resolved.set_exception(error)
