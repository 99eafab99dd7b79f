"""Families with latent attention (DeepSeek), and their layers."""
