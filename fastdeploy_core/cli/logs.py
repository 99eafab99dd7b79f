"""Logging of the command line tools: one handler on stderr, one line per record.

Control characters are escaped, so that nothing a client sends can forge a line.
"""

from __future__ import annotations

import logging
import sys
import warnings

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_LINE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (9, 10)}


class LineFormatter(logging.Formatter):
    """Message on one line; a traceback keeps its line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Called by format()."""
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Called by format()."""
        return super().formatException(ei).translate(_LINE_ESCAPES)  # type: ignore[arg-type]


def setup_logging(level: str = "info") -> None:
    """Send everything of this level and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    warnings.simplefilter("default")
