"""HTTP below the routes: the socket, the protocol, the middleware, strict JSON, and error answers.

Nothing here depends on models, prompts or OpenAI's API; no file imports another room of serving.
"""
