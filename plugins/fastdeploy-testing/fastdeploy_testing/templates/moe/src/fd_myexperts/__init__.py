"""MoE driver `myexperts` for FastDeploy."""
