"""Servers on one host or several, and a router in front of them: `fastdeploy launch`."""
