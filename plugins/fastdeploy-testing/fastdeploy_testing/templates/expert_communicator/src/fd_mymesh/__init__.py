"""Expert communicator `mymesh` for FastDeploy."""
