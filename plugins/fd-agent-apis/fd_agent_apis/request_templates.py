"""Renders one chat template of a request in a child process that can be killed.

The sandbox denies a template all access, but does not limit its time and memory. So the child
(request_template_child.py) sets itself hard limits and is killed when its wall time is over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.tokenizer.chat_template import MAX_TEMPLATE_CHARS

LIMIT_S = 1.0  # of processor time
IDLE_FACTOR = 10  # where it gets no processor, or sleeps: this many times the limit
STARTUP_LIMIT_S = 20.0  # the start of Python does not count as the template's time
READY = b"ready\n"
# What Python needs to start; nothing here can hold a secret.
_ENVIRONMENT = frozenset({"LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH"})


def render_in_child(source: str, variables: Mapping[str, Any], *, limit_s: float = LIMIT_S) -> str:
    """Render `source`; InvalidRequest when it is malformed, refuses, or exceeds a limit."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"chat_template has {len(source)} characters; "
            f"at most {MAX_TEMPLATE_CHARS} are possible",
            param="chat_template",
        )
    job = {"source": source, "variables": dict(variables), "limit_s": limit_s}
    status, text = _run(json.dumps(job).encode(), limit_s)
    if status != 0:
        raise InvalidRequest(text, param="chat_template")
    return text


def _run(job: bytes, limit_s: float) -> tuple[int, str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "fd_agent_apis.request_template_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
    )
    timer = threading.Timer(STARTUP_LIMIT_S, child.kill)
    try:
        timer.start()
        ready = child.stdout is not None and child.stdout.readline() == READY
        timer.cancel()
        if not ready:
            return 1, "the chat template could not be rendered: no child process"
        is_late = False
        try:
            answer, _ = child.communicate(job, timeout=IDLE_FACTOR * limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
    finally:
        timer.cancel()
        if child.poll() is None:
            child.kill()
        child.communicate()
    if is_late or child.returncode == -signal.SIGPROF:
        return 1, f"the chat template takes longer than {limit_s:g} s to render"
    if child.returncode != 0 or not answer:
        return 1, "the chat template needs too much time or memory"
    return answer[0], answer[1:].decode()
