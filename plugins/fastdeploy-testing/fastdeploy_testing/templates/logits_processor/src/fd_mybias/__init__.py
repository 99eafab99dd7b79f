"""Logits processor `mybias` for FastDeploy."""
