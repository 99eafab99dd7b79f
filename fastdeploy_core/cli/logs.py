"""Logging of the command line tools: standard error, one line per record, and FD_LOG_DIR."""

from __future__ import annotations

import logging
import warnings

from fastdeploy_core.engine.processes.log_format import handlers


def setup_logging(level: str = "info") -> None:
    """Send everything of this level and above to where logs go."""
    root = logging.getLogger()
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers()
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio", "httpx", "httpx2"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    warnings.simplefilter("default")
