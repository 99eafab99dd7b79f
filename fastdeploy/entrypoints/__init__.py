"""Where the servers and the offline API of FastDeploy 2.x are imported from."""
