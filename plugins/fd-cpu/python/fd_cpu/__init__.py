"""Native kernels for x86-64 processors; see _native."""
