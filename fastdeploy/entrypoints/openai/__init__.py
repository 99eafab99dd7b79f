"""The OpenAI-compatible server under its FastDeploy 2.x path."""
