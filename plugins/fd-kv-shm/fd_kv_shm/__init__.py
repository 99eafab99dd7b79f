"""KV transport `shm`: blocks between processes of one host, through shared memory."""
