"""Beam search: the answers whose tokens together are the likeliest, instead of sampled ones."""

from .params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]
