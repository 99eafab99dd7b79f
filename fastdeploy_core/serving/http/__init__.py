"""HTTP below the routes: the socket, the protocol, the gate, strict JSON, and error answers.

Nothing here knows of models, prompts or OpenAI's API; no file imports another room of serving.
"""
