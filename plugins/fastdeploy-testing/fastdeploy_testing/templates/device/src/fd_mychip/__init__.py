"""FastDeploy on MyChip."""
