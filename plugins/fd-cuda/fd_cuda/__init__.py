"""FastDeploy on NVIDIA GPUs."""
