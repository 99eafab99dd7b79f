"""The OpenAI-compatible server: FastAPI on uvicorn and uvloop, around an AsyncEngine. No other room
imports these three."""
