"""Number format myformat."""
