"""Model source `myhub` for FastDeploy."""
