"""FastDeploy on Intel Gaudi2."""
