"""Grammar backend `mygrammar` for FastDeploy."""
