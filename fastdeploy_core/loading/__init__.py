"""From checkpoint files to a filled model: safetensors and GGUF, read ahead, or from the weight
cache."""
