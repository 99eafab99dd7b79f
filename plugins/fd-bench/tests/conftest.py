"""Fixtures and options of the conformance kit."""

pytest_plugins = ["fastdeploy_core.testing.pytest_plugin"]
