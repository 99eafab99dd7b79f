"""`fastdeploy router`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from .options import parse


def main(arguments: Sequence[str]) -> int:
    """`fastdeploy router`."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    from .app import Router  # here, for --help does not need an HTTP library

    asyncio.run(Router(options).run())
    return 0
