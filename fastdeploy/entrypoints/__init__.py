"""FastDeploy 2.x's paths of the servers and the offline API."""
