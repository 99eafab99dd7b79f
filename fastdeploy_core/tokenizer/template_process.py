"""Renders one chat template of a request in a child process that can be killed.

The sandbox keeps a template from reaching anything, but not from using time and memory. So the
child sets itself hard limits and the parent kills it when the wall time is over.

Parent to child: one JSON document. Child to parent: a line when it is ready, then one status byte
(0: rendered text follows, 1: a reason follows).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import InvalidRequest

from .chat_template import MAX_RENDERED_CHARS, MAX_TEMPLATE_CHARS, ChatTemplate, TemplateRefusal

WALL_LIMIT_S = 1.0
STARTUP_LIMIT_S = 20.0  # starting Python is not the template's fault
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
MAX_PROCESSES = 4
_READY = b"ready\n"
# What Python needs to start; nothing that could hold a secret.
_ENVIRONMENT = frozenset({"LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH"})
_places = threading.BoundedSemaphore(MAX_PROCESSES)


def render_in_child(
    source: str, variables: Mapping[str, Any], *, wall_limit_s: float = WALL_LIMIT_S
) -> str:
    """Render `source`; InvalidRequest when it is malformed, refuses, or exceeds a limit."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"chat_template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are possible",
            param="chat_template",
        )
    job = json.dumps({"source": source, "variables": dict(variables)}).encode()
    with _places:
        status, text = _run(job, wall_limit_s)
    if status != 0:
        raise InvalidRequest(text, param="chat_template")
    return text


def _run(job: bytes, wall_limit_s: float) -> tuple[int, str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
    )
    timer = threading.Timer(STARTUP_LIMIT_S, child.kill)
    try:
        assert child.stdout is not None
        timer.start()
        ready = child.stdout.readline() == _READY
        timer.cancel()
        if not ready:
            return 1, "the chat template could not be rendered: no child process"
        try:
            answer, _ = child.communicate(job, timeout=wall_limit_s)
        except subprocess.TimeoutExpired:
            return 1, f"the chat template takes longer than {wall_limit_s:g} s to render"
    finally:
        timer.cancel()
        if child.poll() is None:
            child.kill()
        child.communicate()
    if child.returncode != 0 or not answer:
        return 1, "the chat template needs too much time or memory"
    return answer[0], answer[1:].decode()


def _own_bytes() -> int:
    """Address space in use before the template runs."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return MEMORY_LIMIT_BYTES
    return pages * resource.getpagesize()


def child_main() -> None:
    """The child's life: limits, one job, one answer."""
    memory = _own_bytes() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    job = json.loads(sys.stdin.buffer.read())
    cpu_s = int(WALL_LIMIT_S) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    try:
        text = ChatTemplate(job["source"]).render(job["variables"], MAX_RENDERED_CHARS)
        answer = b"\0" + text.encode()
    except (TemplateRefusal, UnicodeEncodeError) as error:
        answer = b"\1" + str(error).encode(errors="replace")
    except (MemoryError, RecursionError):
        answer = b"\1the chat template needs too much memory"
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    child_main()
