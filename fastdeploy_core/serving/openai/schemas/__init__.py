"""What clients may send: strict pydantic models of request bodies, one file per route family."""
