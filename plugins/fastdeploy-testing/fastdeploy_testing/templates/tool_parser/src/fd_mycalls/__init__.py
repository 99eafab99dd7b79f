"""Tool-call parser `mycalls` for FastDeploy."""
