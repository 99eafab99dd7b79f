"""Drafts by EAGLE-3 and DFlash checkpoints, which read hidden states of several layers."""
