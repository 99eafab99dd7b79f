"""Tokens between ranks that hold different experts: the plain one of fd-accelerator, to begin with.

It gives every token to every rank. Override `plan`, `dispatch` and `combine` with your network's
all-to-all; the kit compares with what they did.
"""

from fd_accelerator.expert_communicator import AllGatherExperts


class MyMeshExperts(AllGatherExperts):
    """See contracts.moe.ExpertCommunicator."""

    name = "mymesh"
    contract = (1, 0)
