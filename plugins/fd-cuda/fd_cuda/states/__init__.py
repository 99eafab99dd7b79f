"""Layers that keep a state: gated delta nets, Mamba-2 and short convolutions, in Triton."""
