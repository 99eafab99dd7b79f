"""Latent attention (MLA), to all keys or to those that an indexer chooses."""
