"""KV store `disk`: KV blocks in files, which outlive the engine and serve others on this host."""
