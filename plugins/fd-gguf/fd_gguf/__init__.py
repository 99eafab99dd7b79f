"""GGUF checkpoints: one file with settings, tokenizer and (quantized) tensors, in llama.cpp's
format.

The core asks the driver in `checkpoint`. `reader` reads the file within its own bounds, `blocks`
decodes its number formats, `settings` makes a config.json, `names` maps tensors to checkpoint
names, `tokenizer` and `folder` make a tokenizer folder, `weights` gives the loader its tensors.
`quantizer` keeps matrices packed. Only `weights` and `quantizer` use tensors of the engine.
"""
