"""Drafts by multi-token-prediction layers: trained with the target, run behind its last layer."""
