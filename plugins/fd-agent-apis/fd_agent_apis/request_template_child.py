"""The child process that renders one template of a request: `python -m ...request_template_child`.

It reads one JSON document {source, variables, limit_s} from its parent. It writes one line when it
is ready, then one status byte (0: rendered text follows, 1: a reason follows).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from fastdeploy_core.tokenizer.chat_template import ChatTemplate, TemplateRefusal

from .request_templates import READY

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024


def main() -> None:
    """Set limits, read one job, write one answer."""
    memory = _own_bytes() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    job = json.loads(sys.stdin.buffer.read())
    # Processor time, so that the machine's load does not decide what is refused.
    signal.setitimer(signal.ITIMER_PROF, job["limit_s"])
    try:
        answer = b"\0" + ChatTemplate(job["source"]).render(job["variables"]).encode()
    except (TemplateRefusal, UnicodeEncodeError) as error:
        answer = b"\1" + str(error).encode(errors="replace")
    except (MemoryError, RecursionError):
        answer = b"\1the chat template needs too much memory"
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def _own_bytes() -> int:
    """Address space in use before the template runs."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return MEMORY_LIMIT_BYTES
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
