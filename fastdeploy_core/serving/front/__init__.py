"""The port and the API servers that share it: who accepts a connection, and which process gets
it."""
