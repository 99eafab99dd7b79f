"""A model family as a plugin: GPT-NeoX."""
