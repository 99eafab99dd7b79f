"""Speculative methods that need no layers of their own: n-grams, suffixes, a draft model."""
