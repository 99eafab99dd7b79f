"""Servers on a Ray cluster."""
