"""`fastdeploy bench eval`: lm-eval's command under the name that FastDeploy 2.x gave it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fastdeploy_core.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Run it with these words; its exit status."""
    if find_spec("lm_eval") is None:
        raise ConfigError('lm-eval, which evaluates, is not installed: pip install "lm-eval[api]"')
    return subprocess.call([sys.executable, "-m", "lm_eval", *argv])  # noqa: S603
