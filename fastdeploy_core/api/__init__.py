"""The offline Python API. Import `LLM` from `fastdeploy` or from fastdeploy_core.api.llm."""
