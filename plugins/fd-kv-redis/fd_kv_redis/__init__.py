"""KV store `redis`: blocks that engines of several hosts keep and share."""
