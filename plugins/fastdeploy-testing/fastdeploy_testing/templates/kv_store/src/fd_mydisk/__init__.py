"""KV store `mydisk` for FastDeploy."""
