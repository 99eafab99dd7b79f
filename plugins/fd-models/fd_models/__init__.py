"""Model families beside those of the core, each a parts list in one file."""
