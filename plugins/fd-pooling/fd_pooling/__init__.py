"""Prompts pooled to vectors: embeddings, scores, classes and rewards, offline and over HTTP."""
