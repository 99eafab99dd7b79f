"""Families whose blocks are put together in another way: where norms, sums and factors stand."""
