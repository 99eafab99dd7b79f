"""Routing of requests to instances: policies, and `fastdeploy router`."""
