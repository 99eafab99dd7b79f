"""From logits to tokens: constraints, penalties, grammar masks, filtering, sampling, logprobs."""
