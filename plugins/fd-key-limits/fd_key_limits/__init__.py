"""What each API key may use: requests and tokens per minute, and requests at once."""
