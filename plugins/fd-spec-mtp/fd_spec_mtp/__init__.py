"""Drafts by multi-token-prediction layers, which were trained with the target and run after its
last layer."""
