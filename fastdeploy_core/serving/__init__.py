"""The OpenAI-compatible server: FastAPI on uvicorn, around an AsyncEngine. The only room with them."""
