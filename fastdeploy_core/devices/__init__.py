"""Base classes that device plugins build on. A plugin states facts or overrides a few methods.

| module | for |
|---|---|
| `host_device` | a device that computes in the memory of the host |
| `host_communicator` | collectives between processes of one machine, over shared memory |

Bases for a chip that PaddlePaddle or torch reaches are the distribution `fd-accelerator`.

The room is public, like contracts/. Nothing in it is required: a class that implements
`contracts.device.DeviceBackend` without these bases is as good. Importing the room imports no
tensor library.
"""
