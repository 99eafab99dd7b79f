"""Makes a quantized checkpoint of a model: `fastdeploy quantize`.

Without calibration text, weights are rounded while they stream by, one layer in memory at a time.
With it, the model runs block by block: a block's inputs are observed in full precision, its weights
rounded with what was seen, and its outputs computed with the rounded ones before the next block.
"""
