"""GGUF checkpoints: one file with settings, tokenizer and (quantized) tensors, as llama.cpp writes
it.

`checkpoint` is the driver that the core asks. `reader` reads the file with bounds of its own,
`blocks` its number formats, `settings` makes a config.json, `names` the tensors' checkpoint names,
`tokenizer` and `folder` a tokenizer folder, `weights` the tensors that the loader wants.
`quantizer` keeps matrices packed. Only `weights` and `quantizer` meet tensors of the engine.
"""
