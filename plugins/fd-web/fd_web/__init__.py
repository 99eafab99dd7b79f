"""The page at `/`: a chat with the model, and what the server does. `page` is built from `ui`."""
