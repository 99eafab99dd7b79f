"""Kernels for the device `myops` for FastDeploy."""
