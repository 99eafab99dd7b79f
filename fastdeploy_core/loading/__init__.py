"""From checkpoint files to a loaded model: safetensors with read-ahead, GGUF, or the weight
cache."""
