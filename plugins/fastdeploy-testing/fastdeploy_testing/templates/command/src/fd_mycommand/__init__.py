"""Command `fastdeploy mycommand` for FastDeploy."""
