"""Reasoning and tool parsers of Qwen, ERNIE and DeepSeek models."""
