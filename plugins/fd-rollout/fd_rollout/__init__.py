"""Rollouts: control (states of an engine), worker and memory (what sleeps), weights and sources
(what replaces them), routes and offline (who asks), trainer (the other side of source `shared`)."""
