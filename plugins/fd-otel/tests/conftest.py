"""Fixtures and options of the conformance kit."""

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]
