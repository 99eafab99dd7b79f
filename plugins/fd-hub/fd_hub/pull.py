"""`fastdeploy pull`: download a model before anything is served, as an image's build does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fastdeploy_core import envs
from fastdeploy_core.cli.logs import setup_logging
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.plugins.checkpoints import fetch


def main(argv: Sequence[str]) -> int:
    """Download; prints the folder, which every command takes as --model."""
    arguments = _parser().parse_args(argv)
    setup_logging(envs.FD_LOG_LEVEL)
    print(fetch(arguments.model, arguments.revision, arguments.download_dir))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy pull",
        description="Download a model by name, or bring it up to date, and print its folder. "
        "FD_MODEL_SOURCE says from where: huggingface (default), modelscope or aistudio.",
    )
    parser.add_argument("model", metavar="NAME", help="such as baidu/ERNIE-4.5-0.3B-Paddle")
    parser.add_argument("--revision", default="", help="branch, tag or commit")
    parser.add_argument(
        "--download-dir", metavar="DIR", help="where to keep it; default: the hub's own cache"
    )
    return parser
