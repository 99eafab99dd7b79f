"""Makes a quantized checkpoint of a model: `fastdeploy quantize`.

Without calibration text, weights are rounded while they stream by, one layer in memory at a time.
With it, the model runs block by block: the block's inputs are observed in full precision, its
weights are rounded with these observations, and its outputs are computed with the rounded weights
before the next block starts.
"""
