"""LoRA adapters for FastDeploy: files (what PEFT writes), layers (slots, and which row has which),
kernels (the operation `lora`), routes (adapters that come and go while the server runs)."""
