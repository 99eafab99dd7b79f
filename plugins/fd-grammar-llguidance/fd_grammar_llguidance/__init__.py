"""Grammar backend `llguidance`: JSON schemas, regular expressions, choices, grammars and tags."""
