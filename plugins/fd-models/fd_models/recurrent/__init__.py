"""Families with recurrent layers, these layers, and the driver that computes them."""
