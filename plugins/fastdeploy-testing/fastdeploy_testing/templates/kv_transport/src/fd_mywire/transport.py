"""KV blocks between instances: the shared memory of fd-kv-shm, to begin with.

What makes a transport hard is not the bytes: it is when nothing can land any more. fd-kv-shm
answers that; replace what it does with your wire part by part, and let the kit compare.
"""

from fd_kv_shm.shm import SharedMemoryTransport


class MyWireTransport(SharedMemoryTransport):
    """See contracts.kv_transport.KVTransport."""

    name = "mywire"
    contract = (1, 0)
