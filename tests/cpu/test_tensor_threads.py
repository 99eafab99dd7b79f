"""A tensor library that one thread imported is used by others: every engine runs in a thread."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading
from fastdeploy_core import tensor

seen = []
def use():
    xp = tensor.load(sys.argv[1])
    x = xp.ones([3])
    seen.append((xp.size(x), float((x + 1).sum())))

for _ in range(2):
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
use()
print(seen)
"""


def test_every_thread_gets_values(tensor_library: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, tensor_library],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "[(3, 6.0), (3, 6.0), (3, 6.0)]", done.stderr[-2000:]
