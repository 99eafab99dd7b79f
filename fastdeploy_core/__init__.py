"""FastDeploy's core: the plugin contract, the engine, the server and the reference device.

Importing it imports no tensor library and loads no plugin.
"""

__version__ = "0.1.0"
