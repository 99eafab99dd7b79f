"""What instances have cached: by the events that they publish, and by what they were sent."""
