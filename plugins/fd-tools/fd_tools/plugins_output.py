"""Standard output is the command's own: what plugins print goes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def asking_plugins() -> Iterator[None]:
    """Within it, what plugins and the libraries they load write to descriptor 1 goes to 2."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def answer(text: str) -> None:
    """Print the command's output. What plugins print after it, at the end of the process too, goes
    to standard error."""
    print(text, flush=True)
    if sys.stdout is sys.__stdout__:
        os.dup2(2, 1)
