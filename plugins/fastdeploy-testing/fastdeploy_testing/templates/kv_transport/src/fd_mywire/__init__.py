"""KV transport `mywire` for FastDeploy."""
