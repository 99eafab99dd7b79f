"""LoRA under vLLM's path."""
