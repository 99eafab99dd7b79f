"""The engine as processes: starting and watching them, and what they send each other."""
