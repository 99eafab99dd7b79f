"""`fastdeploy serve`: arguments in, a running server, an exit code out."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError

from .logs import setup_logging
from .parsing import parse_table


def main(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    setup_logging(envs.read("FD_LOG_LEVEL"))  # arguments without effect are lines of the log, too
    for name, meant in envs.misspelt():
        logging.getLogger(__name__).warning("%s has no effect; did you mean %s?", name, meant)
    about = "Serve a model through an OpenAI-compatible API."
    values, _ = parse_table(argv, "fastdeploy serve", about, ("engine", "server"))
    if level := values.get("log_level"):
        os.environ.update(FD_LOG_LEVEL=level)  # of the processes that are started, too
        setup_logging(level)
    try:
        tempfile.gettempdir()  # sockets of the server's processes are made there
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}; set TMPDIR to a folder of this user") from None
    from fastdeploy_core.config.argument_values import with_defaults
    from fastdeploy_core.engine.processes import early_engine

    # Before anything else is imported here: what the engine's process has to import takes longest.
    early_engine.prepare(with_defaults(values)["tensor_library"])
    try:
        from fastdeploy_core.serving.launch import serve

        return serve(values)
    finally:
        early_engine.discard()
