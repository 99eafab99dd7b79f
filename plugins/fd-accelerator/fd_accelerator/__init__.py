"""Base classes of devices that PaddlePaddle or torch reaches. A plugin states facts or overrides a
few methods.

| module | for |
|---|---|
| `paddle_device` | a chip that PaddlePaddle reaches: a custom device or a vendor's own build |
| `torch_device` | a chip that torch reaches, itself or through a vendor's package |
| `vendor_operators` | operators that a vendor's packages bring for PaddlePaddle |

Importing these imports no tensor library; `paddle_place` and `torch_place`, what the libraries'
Python interfaces know of a chip besides tensors, each import theirs.
"""
