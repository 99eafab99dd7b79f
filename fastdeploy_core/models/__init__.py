"""Model families, each a parts list in one file; `shapes.read_shapes` finds one by architecture."""
