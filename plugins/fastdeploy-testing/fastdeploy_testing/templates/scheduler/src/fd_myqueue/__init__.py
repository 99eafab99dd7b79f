"""Request scheduler `myqueue` for FastDeploy."""
