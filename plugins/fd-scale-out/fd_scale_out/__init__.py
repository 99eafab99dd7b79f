"""Several engines or API server processes behind one port; whole experts on each rank; KV
blocks that engines share."""
