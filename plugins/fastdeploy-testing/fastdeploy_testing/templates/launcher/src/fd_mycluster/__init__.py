"""Launcher `mycluster` for FastDeploy."""
