"""Which instances compute prompts for others, by what the traffic needs."""
