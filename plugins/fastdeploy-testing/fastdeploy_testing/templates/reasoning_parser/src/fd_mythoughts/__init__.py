"""Reasoning parser `mythoughts` for FastDeploy."""
