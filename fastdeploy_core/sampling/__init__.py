"""From logits to tokens: constraints, penalties, grammar masks, filtering, the draw, logprobs."""
