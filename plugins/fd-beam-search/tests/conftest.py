"""Fixtures and options of the conformance kit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]
