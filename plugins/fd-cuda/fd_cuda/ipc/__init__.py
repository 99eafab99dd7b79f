"""Memory that several processes of one host share: blocks from GPU memory to GPU memory."""
