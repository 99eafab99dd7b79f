"""`python -m fastdeploy.entrypoints.openai.multi_api_server`: says what is run instead.

There clients choose among servers; here the engines of one server share a port.
"""

from __future__ import annotations

import sys

INSTEAD = (
    "multi_api_server has no counterpart: one port serves all engines. Run\n"
    "  fastdeploy serve MODEL --data-parallel-size N --api-server-count N\n"
    "or, for servers of their own behind a router, fastdeploy launch MODEL --instances N"
)

if __name__ == "__main__":
    sys.exit(INSTEAD)
