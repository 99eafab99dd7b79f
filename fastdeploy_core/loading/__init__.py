"""From checkpoint files to a loaded model: safetensors with read-ahead, formats of plugins, or the
weight cache."""
