"""`python -m fastdeploy.entrypoints.openai.api_server --model DIR`: the same as `fastdeploy
serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    from fastdeploy_core.cli.main import main as run

    return run(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
