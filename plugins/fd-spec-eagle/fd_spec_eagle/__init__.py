"""Drafts by EAGLE-3 checkpoints, which read hidden states of several of the target's layers."""
