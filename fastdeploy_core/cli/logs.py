"""Logging of the command line tools: one handler on stderr, one line per record."""

from __future__ import annotations

import logging
import sys
import warnings

from fastdeploy_core.engine.processes.log_format import LineFormatter

__all__ = ["LineFormatter", "setup_logging"]


def setup_logging(level: str = "info") -> None:
    """Send everything of this level and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio", "httpx", "httpx2"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    warnings.simplefilter("default")
