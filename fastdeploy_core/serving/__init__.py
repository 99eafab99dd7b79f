"""The OpenAI-compatible server: FastAPI on uvicorn and uvloop, around an AsyncEngine. The only room
with them."""
