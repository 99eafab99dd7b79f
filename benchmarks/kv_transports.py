"""How fast KV transports move blocks, beside memcpy, NIXL and Mooncake themselves, in one run.

    python benchmarks/kv_transports.py
    python benchmarks/kv_transports.py --block-kib 64 1024 --rounds 9 shm tcp nixl-raw

Each way fetches a request of --request-mib, made of blocks of one size in random order, from a
process of its own. Ways take turns, round by round, so that all meet the same machine; printed are
the best rate of each, as GB/s, and as a share of memcpy's. `nixl-raw` (which chooses shared memory
or CMA), `nixl-raw-tcp` and `mooncake-raw` are the libraries without FastDeploy: no authentication,
no fence, and their memory is the target itself. NIXL has no progress thread, which would spin.

A way that cannot run here is named with its reason, and left out.

With --faults: how long a killed and a frozen peer and a network that is cut stay unnoticed, and how
many bytes arrive in blocks that were given up (the transfer released or cancelled, which Mooncake
itself does not offer; the blocks used for something else) once a frozen peer goes on or the network
is whole again. To cut a network takes root and `ip`, `nsenter`, `unshare`: the peer gets a network
namespace of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import platform
import random
import secrets
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from figures import add_json_option, print_figures

from fastdeploy_core.contracts.kv_transport import (
    Region,
    TransferEventKind,
    TransferPlan,
    TransportOptions,
)
from fastdeploy_core.plugins.drivers import lookup

WAYS = ("memcpy", "shm", "tcp", "nixl", "mooncake", "nixl-raw", "nixl-raw-tcp", "mooncake-raw")
MIB = 1 << 20
POOL_BYTES = 256 * MIB
GIVE_UP_S = 10.0
CANARY = 0xA5


class Network:
    """A network namespace for the other process, and a pair of interfaces there and here."""

    def __init__(self) -> None:
        # It ends with its standard input, that is with this process.
        self._holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        process, own = str(self._holder.pid), Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{process}/ns/net").readlink() == own:
            if self._holder.poll() is not None:
                raise RuntimeError("this process may not make a network namespace")
            time.sleep(0.01)
        self.within = ("nsenter", "-t", process, "-n")
        call("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", process)
        for within, address, device in (((), HERE, NEAR), (self.within, THERE, FAR)):
            call(*within, "ip", "address", "add", f"{address}/24", "dev", device)
            call(*within, "ip", "link", "set", device, "up")
            call(*within, "ip", "link", "set", "lo", "up")

    def cut(self) -> None:
        """What either side sends goes to nobody."""
        nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev")
        call("ip", "neighbour", "replace", THERE, *nobody, NEAR)
        call(*self.within, "ip", "neighbour", "replace", HERE, *nobody, FAR)

    def heal(self) -> None:
        """Both reach each other again."""
        call("ip", "neighbour", "flush", "dev", NEAR, "nud", "permanent")
        call(*self.within, "ip", "neighbour", "flush", "dev", FAR, "nud", "permanent")

    def close(self) -> None:
        """The interfaces go with the namespace, but not at once."""
        subprocess.run(["ip", "link", "delete", NEAR], check=False, capture_output=True)
        self._holder.kill()
        self._holder.wait()


class Memcpy:
    """Copies within this process, from memory like that which others have to read."""

    def __init__(self) -> None:
        self.target, self._source = new_pool(0), shared_pool(7)

    def fetch(self, source: list[int], target: list[int], size: int) -> None:
        """Blocks of `size` bytes from their places there to places here."""
        here, there = self.target.data, self._source.data
        for one, other in zip(target, source, strict=True):
            here[one * size : (one + 1) * size] = there[other * size : (other + 1) * size]

    def close(self) -> None:
        """End whatever was started."""


class Child:
    """What ways with another process share."""

    def __init__(self, way: str, network: Network | None = None) -> None:
        self.way, self.target = way, new_pool(0)
        self.network = network
        environment = os.environ | ENVIRONMENT
        if way.endswith("-tcp"):
            environment |= OVER_TCP
        within = ()
        if network is not None:
            within, environment = network.within, environment | over_network(FAR, THERE)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(
            [*within, sys.executable, __file__, "--serve", way, *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdin.write(SECRET + "\n")
        self.process.stdin.flush()
        try:
            lines = iter(self.process.stdout.readline, "")
            self.told = next((json.loads(x[6:]) for x in lines if x.startswith("serve ")), None)
            if self.told is None:
                self._errors.seek(0)
                said = ["nothing", *(line.strip() for line in self._errors if line.strip())]
                raise RuntimeError(f"the serving process has ended and said: {said[-1]}")
            self._connect()
        except BaseException:
            Child.close(self)
            raise

    def _connect(self) -> None:
        """To the process, which has told how."""
        raise NotImplementedError

    def close(self) -> None:
        """End whatever was started."""
        self.process.kill()
        self.process.wait()
        self._errors.close()


class Driver(Child):
    """A transport of FastDeploy."""

    def _connect(self) -> None:
        self._open = open_driver(self.way, self.target, SIZES)
        self._peer = self._open.connect(bytes.fromhex(self.told["descriptor"]))
        self._number = 0

    def fetch(self, source: list[int], target: list[int], size: int) -> None:
        """As Memcpy's; RuntimeError if it fails."""
        self.start(source, target, size)
        while (state := self.state()) == "PROC":
            pass
        if state != "DONE":
            raise RuntimeError(f"{self.way}: {state}")

    def start(self, source: list[int], target: list[int], size: int) -> None:
        """Begin a transfer."""
        self._number += 1
        region = SIZES.index(size)
        self._open.submit(self._peer, TransferPlan(self._number, 0, [region], source, target, 60))

    def state(self) -> str:
        """PROC, DONE, or why it failed."""
        for event in self._open.poll():
            if event.transfer_id == self._number:
                if event.kind is TransferEventKind.DONE:
                    return "DONE"
                if event.kind is TransferEventKind.FAILED:
                    return event.reason
        select.select([self._open.fileno()], [], [], 0.1)
        return "PROC"

    def give_up(self) -> None:
        """The blocks are wanted for something else."""
        self._open.cancel(self._number)
        self._open.fence(self._peer)

    def close(self) -> None:
        """End whatever was started."""
        self._open.close()
        super().close()


class Nixl(Child):
    """NIXL as its documentation uses it, pulling, without its progress thread."""

    def _connect(self) -> None:
        self._agent = nixl_agent("target", self.target)
        self._peer = self._agent.add_remote_agent(bytes.fromhex(self.told["metadata"]))
        self._request: Any = None

    def fetch(self, source: list[int], target: list[int], size: int) -> None:
        """As Memcpy's."""
        self.start(source, target, size)
        while (state := self.state()) == "PROC":
            pass
        if state != "DONE":
            raise RuntimeError(f"{self.way}: {state}")
        self._request.release()

    def start(self, source: list[int], target: list[int], size: int) -> None:
        """Begin a transfer."""
        here, there = (
            self._agent.get_xfer_descs(places(address, blocks, size), "DRAM")
            for address, blocks in (
                (self.target.ctypes.data, target),
                (self.told["address"], source),
            )
        )
        self._request = self._agent.initialize_xfer("READ", here, there, self._peer)
        self._state = self._agent.transfer(self._request)

    def state(self) -> str:
        """PROC, DONE, or what NIXL says."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._request)
            except Exception as error:
                self._state = type(error).__name__
        return self._state

    def give_up(self) -> None:
        """As NIXL lets one: the request is released, the peer removed."""
        self._request.release()


class Mooncake(Child):
    """Mooncake's engine, pulling."""

    def _connect(self) -> None:
        self._engine = mooncake_engine(self.target)

    def start(self, source: list[int], target: list[int], size: int) -> None:
        """Begin a transfer, in a thread: the engine's reads return when all has come."""
        self._state = "PROC"

        def read() -> None:
            try:
                self.fetch(source, target, size)
                self._state = "DONE"
            except RuntimeError as error:
                self._state = str(error)

        threading.Thread(target=read, daemon=True).start()

    def state(self) -> str:
        """PROC, DONE, or Mooncake's code."""
        time.sleep(0.001)
        return self._state

    def give_up(self) -> None:
        """Nothing takes a read back."""

    def fetch(self, source: list[int], target: list[int], size: int) -> None:
        """As Memcpy's."""
        address, there = self.target.ctypes.data, self.told["address"]
        for first in range(0, len(source), 256):  # more at once make it fail
            code = self._engine.batch_transfer_sync_read(
                self.told["session"],
                [address + block * size for block in target[first : first + 256]],
                [there + block * size for block in source[first : first + 256]],
                [size] * len(target[first : first + 256]),
            )
            if code:
                raise RuntimeError(f"{self.way}: code {code}")


ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "GLOG_minloglevel": "3",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TRANSFER_TIMEOUT": "60",
}
OVER_TCP = {
    "UCX_TLS": "tcp,self,cuda_copy",
    "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
}
SECRET = secrets.token_hex(32)
# Of 198.18.0.0/15, which RFC 2544 sets apart for tests.
HERE, THERE, NEAR, FAR = "198.18.79.1", "198.18.79.2", f"fdkv{os.getpid() % 100000}", "fdkv"
NO_NETWORK = ("memcpy", "shm", "nixl-raw")
SIZES: list[int] = []
FILE = -1  # of the pool, where others may map it


def over_network(device: str, address: str) -> dict[str, str]:
    """Environment of a process that is to use this interface."""
    ucx = {"UCX_TLS": "tcp,self,cuda_copy", "UCX_NET_DEVICES": device}
    return ucx | {"FD_KV_TCP_ADDRESS": address, "KV_ADDRESS": address}


def call(*words: str) -> None:
    """A command that does not fail."""
    subprocess.run(words, check=True)


def new_pool(value: int) -> np.ndarray:
    """Touched memory."""
    return np.full(POOL_BYTES, value, np.uint8)


def shared_pool(value: int) -> np.ndarray:
    """The same in a file, as an engine has its host tier."""
    global FILE
    FILE = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(FILE, POOL_BYTES)
    fcntl.fcntl(FILE, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    pool = np.frombuffer(mmap.mmap(FILE, POOL_BYTES), np.uint8)
    pool[:] = value
    return pool


def places(address: int, blocks: list[int], size: int) -> np.ndarray:
    """[blocks, 3]: address, bytes, device."""
    found = np.zeros((len(blocks), 3), np.uint64)
    found[:, 0] = address + np.asarray(blocks, np.uint64) * np.uint64(size)
    found[:, 1] = size
    return found


def open_driver(way: str, pool: np.ndarray, sizes: list[int]) -> Any:
    """With the pool as one region for each size of blocks."""
    transport = lookup("kv_transport", way)(TransportOptions(secret=bytes.fromhex(SECRET)))
    regions = [Region(n, pool.data, size, f"b{size}", FILE) for n, size in enumerate(sizes)]
    transport.register(regions)
    return transport


def nixl_agent(name: str, pool: np.ndarray) -> Any:
    """With the pool registered."""
    from nixl import _api

    agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX")
    agent.register_memory(places(pool.ctypes.data, [0], len(pool)), "DRAM")
    return agent


def mooncake_engine(pool: np.ndarray) -> Any:
    """With the pool registered."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(os.environ.get("KV_ADDRESS", "127.0.0.1"), "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("Mooncake does not start")
    engine.register_memory(pool.ctypes.data, len(pool))
    return engine


def serve(way: str) -> None:
    """In a process of its own: be read from until killed."""
    global SECRET
    SECRET = sys.stdin.readline().strip()
    pool = shared_pool(7)
    told: dict[str, Any] = {"address": pool.ctypes.data}
    agent = None
    if way.startswith("nixl-raw"):
        agent = nixl_agent("source", pool)
        told["metadata"] = agent.get_agent_metadata().hex()
    elif way == "mooncake-raw":
        engine = mooncake_engine(pool)
        host = os.environ.get("KV_ADDRESS", "127.0.0.1")
        told["session"] = f"{host}:{engine.get_rpc_port()}"
    else:
        transport = open_driver(way, pool, SIZES)
        told["descriptor"] = transport.descriptor().hex()
    print("serve " + json.dumps(told), flush=True)
    while True:
        if agent is not None:
            agent.get_new_notifs()
        time.sleep(0.0002 if agent is not None else 60)


def make(way: str, network: Network | None = None) -> Any:
    """A way by its name; with a network between both processes, or on one host."""
    if way == "memcpy":
        return Memcpy()
    kind = Mooncake if way == "mooncake-raw" else Driver
    if way.startswith("nixl-raw"):
        kind = Nixl
    # UCX reads them when a context is made.
    settings = OVER_TCP if way.endswith("-tcp") else {}
    if network is not None:
        settings = over_network(NEAR, HERE)
    os.environ.update(settings)
    try:
        return kind(way, network)
    finally:
        for name in settings:
            del os.environ[name]


def rates(options: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of each way and size in each round."""
    found: dict[str, list[float]] = defaultdict(list)
    ways: dict[str, Any] = {}
    rng = random.Random(0)
    with ExitStack() as stack:
        for way in options.ways:
            try:
                ways[way] = make(way)
            except Exception as error:  # a library that is not here, or does not take this host
                print(f"{way}: not measured: {error}", flush=True)
            else:
                stack.callback(ways[way].close)
        for number in range(options.rounds + 1):
            for size in SIZES:
                total = POOL_BYTES // size
                # The first round connects, and touches all memory.
                count = options.request_mib * MIB // size if number else total
                for way, one in ways.items():
                    source, target = (
                        rng.sample(range(total), count),
                        rng.sample(range(total), count),
                    )
                    began = time.perf_counter()
                    one.fetch(source, target, size)
                    rate = count * size / (time.perf_counter() - began) / 1e9
                    assert (
                        one.target[target[0] * size] == one.target[(target[-1] + 1) * size - 1] == 7
                    )
                    if number:
                        found[f"{way}, blocks of {size >> 10} KiB, GB/s"].append(rate)
    return found


def fault(way: str, what: str) -> str:
    """When the loss was noticed, and how many bytes came late."""
    if way == "memcpy":
        return "needs no other process"
    if what == "partition" and way in NO_NETWORK:
        return "needs no network"
    size = SIZES[-1]
    blocks = list(range(POOL_BYTES // size))
    with ExitStack() as stack:
        network = None
        try:
            if what == "partition":
                network = Network()
                stack.callback(network.close)
            one = make(way, network)
            stack.callback(one.close)
            one.fetch(blocks[:2], blocks[:2], size)
        except Exception as error:  # no right to cut a network, or a library that does not take it
            return f"not measured: {error}"
        one.start(blocks, blocks[::-1], size)
        time.sleep(0.005)
        if network is None:
            one.process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        else:
            network.cut()
        began = time.perf_counter()
        state = "PROC"
        while state == "PROC" and time.perf_counter() - began < GIVE_UP_S:
            state = one.state()
        seconds = time.perf_counter() - began
        if state == "DONE":  # nothing of it needs the other process
            return f"finished all the same after {seconds:.2f} s"
        one.give_up()
        one.target[:] = CANARY
        if network is None:
            one.process.send_signal(signal.SIGCONT)
        else:
            network.heal()
        end = time.perf_counter() + 2
        while time.perf_counter() < end:
            one.state()
            time.sleep(0.001)
        late = int(np.count_nonzero(one.target != CANARY))
        noticed = "not noticed within" if state == "PROC" else "noticed after"
        return f"{noticed} {seconds:.2f} s, {late} bytes late"


def show(options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """The best of each, and its share of memcpy's."""
    print(f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(f"requests of {options.request_mib} MiB, {options.rounds} rounds; best GB/s (median)")
    for size in SIZES:
        names = {way: f"{way}, blocks of {size >> 10} KiB, GB/s" for way in options.ways}
        of = {way: found[name] for way, name in names.items() if name in found}
        base = max(of.get("memcpy", [float("nan")]))
        print(f"blocks of {size >> 10} KiB")
        for way, values in of.items():
            best, middle = max(values), statistics.median(values)
            print(f"  {way:14}{best:8.2f} ({middle:.2f}){best / base:8.2f} of memcpy")


def parse_arguments() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--request-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    add_json_option(parser)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    SIZES[:] = [size << 10 for size in options.block_kib]
    if options.serve:
        serve(options.serve)
    os.environ.update(ENVIRONMENT)
    if options.faults:
        for way in options.ways:
            for what in ("kill", "freeze", "partition"):
                print(f"{way:14} {what:10} {fault(way, what)}", flush=True)
        return
    found = rates(options)
    show(options, found)
    print_figures(options, found)


if __name__ == "__main__":
    main()
