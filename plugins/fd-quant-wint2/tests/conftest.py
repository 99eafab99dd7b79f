pytest_plugins = ["fastdeploy_testing.pytest_plugin"]
