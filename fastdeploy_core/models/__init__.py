"""Model families, each a parts list in one file; `shapes.read_shapes` finds one by architecture.
Modules named below are public: what families share (docs/how-to/write-a-model.md).
"""

__all__ = ["decoder", "reading"]
