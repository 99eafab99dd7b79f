"""Speculative method mydraft."""
