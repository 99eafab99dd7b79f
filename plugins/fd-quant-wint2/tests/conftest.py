pytest_plugins = ["fastdeploy_core.testing.pytest_plugin"]
