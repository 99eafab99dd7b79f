"""What passes between host and device memory, and what steps take of it."""
