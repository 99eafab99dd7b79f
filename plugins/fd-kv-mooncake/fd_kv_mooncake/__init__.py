"""KV transport `mooncake`: blocks between processes, moved by the Mooncake transfer engine."""
