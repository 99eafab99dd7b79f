"""Asks plugins who serves a model, in a thread, because that takes its time: other processes start
meanwhile and are told when it is known."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.plugins.resolved import ResolvedPlugins


class Plugins:
    """`resolved`: what was chosen, or why nothing can be. `checked`: later, that what was chosen
    can be imported, or what cannot."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.resolved: Future[ResolvedPlugins] = Future()
        self.checked: Future[None] = Future()
        for answer in (self.resolved, self.checked):
            answer.set_running_or_notify_cancel()  # who stops waiting does not stop the asking
        threading.Thread(target=self._ask, name="fd-plugins", daemon=True).start()

    def _ask(self) -> None:
        try:
            resolved = resolve_plugins(self._config, check=False)
        except BaseException as error:
            self.checked.set_exception(error)
            self.resolved.set_exception(error)
            return
        self.resolved.set_result(resolved)
        try:
            resolved.check()
        except BaseException as error:
            self.checked.set_exception(error)
        else:
            self.checked.set_result(None)
