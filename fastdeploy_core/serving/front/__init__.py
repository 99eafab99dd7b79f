"""The port and the API servers that share it: accepting connections and giving each to one
process."""
