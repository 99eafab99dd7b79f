"""`fastdeploy bench`: throughput and latency of an engine in process, and of a running server."""
