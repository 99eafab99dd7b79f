"""Commands beside `fastdeploy serve`, one module each; http_client.py is of `chat`, `complete`."""
