"""Two bits per weight: the published CCQ layout (ccq.py) and the tet2 trellis code (code.py)."""
