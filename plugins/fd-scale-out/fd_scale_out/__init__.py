"""Several engines, or several API server processes, behind one port."""
