"""The simulated device under the vendor's type name, and the conformance kit's fixtures."""

from fd_simdevice.pytest_plugin import simulate

simulate("metax_gpu")

pytest_plugins = ["fastdeploy_testing.pytest_plugin", "fd_simdevice.pytest_plugin"]
