"""The page at `/`: a chat with the model, and what the server is doing. `page` is built from `ui`."""
