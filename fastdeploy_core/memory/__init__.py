"""What passes between host and device memory while nobody waits, and what steps take of it."""
