"""A simulated accelerator that PaddlePaddle takes for a real one, under any device type name."""
