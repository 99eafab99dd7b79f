"""Weights in the layout of a device, kept in files between starts (`--weight-cache`)."""
