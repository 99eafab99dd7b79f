"""Gemma 3, text (transformers: Gemma3ForCausalLM; arXiv 2503.19786)."""

from __future__ import annotations

from .fields import LOCAL_BASE, LocalRopeLM
from .gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(LocalRopeLM, Gemma2ForCausalLM):
    """Five blocks with a window, then one without, which turns by a base of its own; query and key
    heads are normed."""

    head_norms = True
    rope_theta = 1_000_000.0
    local_theta = 10_000.0
    sliding_window_pattern = 6
    default_caps = (0.0, 0.0)
    only = Gemma2ForCausalLM.only | {"attn_logit_softcapping": (None,)}
    reads = Gemma2ForCausalLM.reads | {
        *(LOCAL_BASE, "sliding_window_pattern", "_sliding_window_pattern"),
    }
