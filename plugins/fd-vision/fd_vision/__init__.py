"""Models that see: their towers, and everything that happens to a picture before the model."""
