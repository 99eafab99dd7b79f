"""APIs that agents speak, as adapters over the chat path: the same templates, parsers and grammars.

A body is read into a conversation (conversation.py, tools.py) and becomes a chat request; the
answer's pieces become blocks (blocks.py), which the API's writer shows as events (job.py).
"""
