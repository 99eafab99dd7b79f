"""The core's conformance kit, for this processor."""

import numpy as np
from fd_mybias.processor import NEVER

from fastdeploy_testing.conformance.test_logits_processor import (
    PROMPT,
    LogitsProcessorConformance,
)


class TestMyBias(LogitsProcessorConformance):
    kind = "logits_processor"
    driver_name = "mybias"
    arguments = ({"mybias": [1, 2, 5]}, {"mybias": [3, 7, 9]})

    def expected(self, logits, history, asked):
        """Tokens that were named, and stand in the prompt or the answer, cannot come again."""
        logits[np.intersect1d(asked["mybias"], [*PROMPT, *history]).astype(int)] = NEVER
        return logits
