"""Prompts that one instance computes and another one answers: KV blocks handed over by a KV
transport, in two phases, with the first token."""
