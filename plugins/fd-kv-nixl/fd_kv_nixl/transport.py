"""KV blocks moved by NIXL; driver `nixl`.

Each reader has an agent of its own: releasing a request does not stop it, destroying its agent
does. Agents have no progress thread, because NIXL's spins: readers poll while they read, and a
thread of ours polls for the agent that is read from while peers say that they read.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from fd_kv_tcp.library import LOOK_S, Library, LibraryTransport, Span, address_of
from fd_scale_out.receiver_driven import WireError

from fastdeploy_core.contracts.kv_transport import TransportCapabilities, TransportOptions
from fastdeploy_core.errors import CapabilityError, ConfigError

BACKEND_VARIABLE: Final = "FD_KV_NIXL_BACKEND"
INSTALL: Final = "pip install nixl"
_PAUSE_S: Final = 0.0002  # between two polls of the agent that is read from
_SPINS: Final = 100  # polls of a read without a pause, then with one
_SERVED_S: Final = 4 * LOOK_S  # after a look, unless another one follows
_CLOSED: Final = "this side ends"


class NixlTransport(LibraryTransport):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "nixl"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=False, max_regions=16
    )

    def open_library(self, options: TransportOptions) -> Library:
        """CapabilityError where NIXL cannot be imported; ConfigError for a backend it lacks."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it tells standard output everything
        try:
            from nixl import _api
        except ImportError as error:
            raise CapabilityError(f"kv transport nixl needs NIXL ({INSTALL}): {error}") from None
        return _Nixl(_api)


class _Nixl:
    """A Library: the agent that peers read from, and readers with theirs."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._name = secrets.token_hex(8)  # agents of one deployment need different names
        self._numbers = itertools.count()
        self._agent: Any = self.make_agent()
        self._wanted = threading.Condition()  # guards the agent
        self._served_s = 0.0  # until then it is polled
        self._thread = threading.Thread(target=self._serve, name="fd-kv-nixl", daemon=True)
        self._thread.start()

    def make_agent(self) -> Any:
        """With the backend of FD_KV_NIXL_BACKEND; ConfigError if there is none of this name."""
        backend = os.environ.get(BACKEND_VARIABLE, "") or "UCX"
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._api.nixl_agent(f"{self._name}-{next(self._numbers)}", config)
        if backend not in agent.get_plugin_list():
            raise ConfigError(
                f"{BACKEND_VARIABLE} is {backend!r:.40}; NIXL has {agent.get_plugin_list()} here"
            )
        agent.create_backend(backend)
        return agent

    def register(self, address: int, num_bytes: int) -> None:
        with self._wanted:
            self._agent.register_memory(_descriptors([(address, num_bytes)]), "DRAM")

    def shown(self) -> bytes:
        with self._wanted:
            if self._agent is None:
                raise WireError(_CLOSED)
            self._served_s = time.monotonic() + _SERVED_S
            self._wanted.notify()
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def reader(self, shown: bytes, landing: memoryview) -> _NixlReader:
        return _NixlReader(self.make_agent(), shown, landing)

    def close(self) -> None:
        with self._wanted:
            self._agent = None
            self._wanted.notify()
        self._thread.join()

    def _serve(self) -> None:
        with self._wanted:
            while self._agent is not None:
                if time.monotonic() < self._served_s:
                    self._agent.get_new_notifs()
                    self._wanted.wait(_PAUSE_S)
                else:
                    self._wanted.wait()


class _NixlReader:
    """A Reader."""

    def __init__(self, agent: Any, shown: bytes, landing: memoryview) -> None:
        self._agent = agent
        try:
            area = (address_of(landing), len(landing))
            agent.register_memory(_descriptors([area]), "DRAM")
            self._peer = agent.add_remote_agent(shown)
        except Exception as error:  # NIXL's errors have no common class
            raise WireError(f"NIXL: {error}") from error

    def read(self, spans: Sequence[Span], landing: int, look: Callable[[], None]) -> None:
        ends = itertools.accumulate((size for _, size in spans), initial=landing)
        targets = [(at, size) for at, (_, size) in zip(ends, spans, strict=False)]
        agent = self._agent
        try:
            here = agent.get_xfer_descs(_descriptors(targets), "DRAM")
            there = agent.get_xfer_descs(_descriptors(spans), "DRAM")
            request = agent.initialize_xfer("READ", here, there, self._peer)
            state = agent.transfer(request)
            for number in itertools.count():
                if state != "PROC":
                    break
                look()
                if number > _SPINS:
                    time.sleep(_PAUSE_S / 4)
                state = agent.check_xfer_state(request)
            request.release()
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"NIXL: {error}") from error
        if state != "DONE":
            raise WireError(f"NIXL: the read ended as {state}")

    def close(self) -> bool:
        self._agent = None  # its destructor ends what is under way
        return True


def _descriptors(spans: Sequence[Span]) -> np.ndarray:
    found = np.zeros((len(spans), 3), np.uint64)  # address, bytes, device
    found[:, :2] = spans
    return found
