"""Where log lines go and what they look like, in the server and in the processes it starts.

One line per record, for people or as JSON (FD_LOG_FORMAT): control characters are escaped, so that
no text of a client can forge a line. They go to standard error and to a file for each process in
FD_LOG_DIR, a new one every day. Of several servers with one folder each has files of its own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError

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


class JsonFormatter(LineFormatter):
    """One JSON object per line: time (UTC), level, process, logger, message; request_id where the
    line is about a request, traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The object as text."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        row = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process or "server",
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            row["request_id"] = request_id
        if record.exc_info:
            row["traceback"] = logging.Formatter.formatException(self, record.exc_info)
        return json.dumps(row)


class DailyFile(logging.handlers.TimedRotatingFileHandler):
    """The log of one process, opened with its first line. FD_LOG_BACKUP_COUNT days are kept."""

    def __init__(self, folder: Path, process: str) -> None:
        kept = int(envs.read("FD_LOG_BACKUP_COUNT"))
        path = folder / f"{process.removeprefix('fastdeploy-') or 'server'}.log"
        super().__init__(path, when="midnight", backupCount=kept, delay=True, encoding="utf-8")
        self._is_lost, self._number = False, 1

    def _open(self) -> TextIO:  # type: ignore[override]
        """The file. One that another server writes to, and renames at midnight, stays its own."""
        stream = super()._open()
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):  # and not a file system without locks
                stream.close()
                path, self._number = Path(self.baseFilename), self._number + 1
                stem = path.name.partition(".")[0]
                self.baseFilename = str(path.with_name(f"{stem}.{self._number}.log"))
                return self._open()
        return stream

    def handleError(self, record: logging.LogRecord) -> None:
        """Said once: standard error has every line, and a full disk would fail each of them."""
        if not self._is_lost:
            self._is_lost = True
            sys.stderr.write(f"{self.baseFilename} misses lines from now on: {sys.exc_info()[1]}\n")

    def name_process(self, name: str) -> None:
        """Later lines go to the file of this process."""
        self.close()
        self._number = 1
        self.baseFilename = str(Path(self.baseFilename).with_name(f"{name}.log"))


def handlers(process: str = "") -> list[logging.Handler]:
    """Standard error and the file of this process. ConfigError if FD_LOG_DIR is no place for it."""
    found: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if given := envs.read("FD_LOG_DIR"):
        folder = Path(given).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"FD_LOG_DIR {given!r} cannot be made: {error.strerror}; set it to a folder that "
                "this user may write to"
            ) from None
        found.append(DailyFile(folder, process))
    kind = JsonFormatter if envs.read("FD_LOG_FORMAT") == "json" else LineFormatter
    for handler in found:
        handler.setFormatter(kind(process=process))
    return found
