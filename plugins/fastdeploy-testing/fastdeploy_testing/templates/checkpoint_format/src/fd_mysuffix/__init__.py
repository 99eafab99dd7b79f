"""Checkpoint format `mysuffix` for FastDeploy."""
