"""How the parsers of an answer work together. Parsers themselves are plugins, found by name through
the entry-point groups fastdeploy.reasoning_parsers and fastdeploy.tool_parsers.
"""
