"""KV transport `nixl`: blocks between processes, moved by NVIDIA's NIXL."""
