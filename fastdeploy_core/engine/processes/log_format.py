"""The format of log lines, in the server and in the processes it starts.

One line per record: control characters are escaped, so that no text of a client can forge a line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import _SysExcInfoType

LINE = "%(asctime)s %(levelname)-7s %(room)s: %(message)s"
TIME = "%m-%d %H:%M:%S"
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_LINE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (9, 10)}


class LineFormatter(logging.Formatter):
    """The message on one line; a traceback keeps its line breaks.

    `%(room)s` is the room of the code that logs (serving, plugins, engine, ...), after the name of
    the process if that differs.
    """

    def __init__(self, fmt: str = LINE, process: str = "") -> None:
        super().__init__(fmt, TIME)
        self._process = process.removeprefix("fastdeploy-")

    def name_process(self, name: str) -> None:
        """Later lines carry this name of the process."""
        self._process = name

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Called by format()."""
        room = record.name.removeprefix("fastdeploy_core.").partition(".")[0]
        if self._process and self._process != room:
            room = f"{self._process}/{room}"
        record.room = room
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: _SysExcInfoType) -> str:
        """Called by format()."""
        return super().formatException(ei).translate(_LINE_ESCAPES)
