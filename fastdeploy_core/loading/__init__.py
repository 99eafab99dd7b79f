"""From checkpoint files to a filled model: safetensors, read ahead, files in formats of plugins, or
the weight cache."""
