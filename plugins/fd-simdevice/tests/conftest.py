"""A simulated device of the neutral type `acme`."""

from fd_simdevice.pytest_plugin import simulate

simulate("acme")

pytest_plugins = ["fd_simdevice.pytest_plugin"]
