"""The core's conformance kit, for this method, and a test of what is its own."""

import numpy as np
from fastdeploy_core.contracts.speculative import DrafterContext, HostDraftInput
from fastdeploy_testing.conformance.test_drafter import DrafterConformance
from fd_mydraft.drafter import MyDraftDrafter


class TestMyDraft(DrafterConformance):
    driver_name = "mydraft"


def test_rare_pairs_are_left_out() -> None:
    tokens = np.array([1, 2, 3, 1, 2, 3, 1], dtype=np.int32)
    batch = HostDraftInput([0], [tokens], [3])
    for min_count, expected in ((1, [2, 3, 1]), (2, [2, 3, 1]), (3, [])):
        context = DrafterContext(3, {"min_count": min_count}, vocab_size=9, max_num_seqs=1)
        assert MyDraftDrafter(context).propose(batch) == [expected]
