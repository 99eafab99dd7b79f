"""kill -9 over every process of a server: nothing is lost, answered twice or wrongly, or leaked."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests import kills
from tests.server_support import lines, write_null_model

NUM_KILLS = 60


def test_texts_do_not_end_the_lines_of_a_stream() -> None:
    """Else an answer that holds such a character counts as one that was lost."""
    sent = ['data: {"text": "\u0085\u2028\u2029"}', "", "data: [DONE]", ""]
    answer = httpx.Response(200, content="\n".join([*sent, ""]).encode())
    assert list(lines(answer)) == sent


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_kill_loses_or_doubles_a_request(tmp_path: Path) -> None:
    model = write_null_model(tmp_path, step_s=0.005, num_blocks=512)
    seen = kills.run(model, NUM_KILLS)
    assert not any(seen[what] for what in kills.BAD), seen
    assert seen["whole"] > NUM_KILLS
