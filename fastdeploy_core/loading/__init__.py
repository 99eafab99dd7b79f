"""From checkpoint files to a loaded model: safetensors with read-ahead, files in formats of plugins,
or the weight cache."""
