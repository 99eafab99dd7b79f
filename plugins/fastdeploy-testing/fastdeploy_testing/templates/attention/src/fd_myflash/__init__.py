"""Attention driver `myflash` for FastDeploy."""
