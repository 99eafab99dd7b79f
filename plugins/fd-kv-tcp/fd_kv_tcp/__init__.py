"""KV transport `tcp`: blocks between hosts, over authenticated TCP."""
