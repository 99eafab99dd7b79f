"""Base classes that device plugins build on. A plugin states facts or overrides a few methods.

| module | for |
|---|---|
| `paddle_device` | a chip that PaddlePaddle reaches: a custom device or a vendor's own build |
| `torch_device` | a chip that torch reaches, itself or through a vendor's package |
| `host_device` | a device that computes in the memory of the host |
| `host_communicator` | collectives between processes of one machine, over shared memory |
| `vendor_operators` | operators that a vendor's packages bring for PaddlePaddle |

The room is public, like contracts/. Nothing in it is required: a class that implements
`contracts.device.DeviceBackend` without these bases is as good. Importing the room imports no
tensor library.
"""
