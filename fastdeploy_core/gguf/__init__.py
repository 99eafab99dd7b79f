"""GGUF checkpoints: one file with settings, tokenizer and (quantized) tensors, as llama.cpp writes it.

Reads the format with bounds of its own and imports no tensor library: `reader` the file, `blocks` its
number formats, `settings` a config.json, `names` the tensors' checkpoint names, `tokenizer` and
`folder` a tokenizer folder. Imported only when a model path leads to a GGUF file.
"""
