"""The engine: `EngineCore.step()`, the executor that runs a step on all ranks, and clients of both.

core.py, executor.py and observer.py run beside rank 0 of the model. input.py, output.py, stream.py
and client.py run where requests come from. processes/ is what joins the two when they are apart.
"""
