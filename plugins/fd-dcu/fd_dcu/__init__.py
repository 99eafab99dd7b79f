"""FastDeploy on Hygon K100AI (DCU)."""
