"""Commands of plugins as the last `fastdeploy --help` found them: to read metadata takes longer
than all else that help does."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fastdeploy_core import __version__, envs


def cached(read: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What read() returned last time, while nothing was installed, removed or chosen since: a file
    of FD_CACHE_DIR for each Python environment. Where there can be none, read() alone."""
    chosen = (envs.FD_PLUGINS, envs.FD_PLUGINS_DISABLED, envs.FD_PLUGINS_PREFERRED)
    state = json.dumps([__version__, chosen, [_folder(Path(path)) for path in sys.path]])
    name = f"commands/{sys.prefix.strip(os.sep).replace(os.sep, '_')}.json"
    try:
        file = Path(envs.FD_CACHE_DIR).expanduser() / name
    except RuntimeError:  # this user has no home
        return read()
    # A file that is not there or, with two writers at once, damaged: it is made again.
    with contextlib.suppress(KeyError, OSError, TypeError, ValueError):
        last = json.loads(file.read_text("utf-8"))
        if last["state"] == state:
            return dict(last["rows"])
    rows = read()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"state": state, "rows": rows}), "utf-8")
    return rows


def _folder(path: Path) -> list[object]:
    """When something came or went in a folder of sys.path, and the distributions that are there, as
    all files of an image may have one time."""
    try:
        names = sorted(each.name for each in path.iterdir() if each.suffix.endswith("-info"))
        return [str(path), path.stat().st_mtime_ns, *names]
    except OSError:
        return [str(path)]
