"""Models by name: downloaded from a hub, checked, and kept for the next start."""
