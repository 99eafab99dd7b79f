"""What all speculative methods share; methods are plugins (contracts/speculative.py)."""
