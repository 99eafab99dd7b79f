"""Prefill and decode apart over a network that is cut, slow or loses packets: the prefill instance
runs in a network namespace of its own, and KV blocks take a link of their own to it.

A link is cut without anybody hearing of it: packets go to an address that nobody has, in one way or
in both. It takes root, `ip`, `tc`, `nsenter` and `unshare`; elsewhere these tests skip.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from roles import TEXT, Apart, ask, check_idle, said, server, taken, text_body
from server_process import CommandProcess
from server_support import wait_for

TOOLS = ("ip", "tc", "nsenter", "unshare")
NOBODY = "02:00:00:00:00:01"
# Of 198.18.0.0/15, which RFC 2544 sets apart for tests.
HTTP, BLOCKS = "198.18.77.{}", "198.18.78.{}"


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Link:
    """A pair of interfaces: here, and in the namespace of a process."""

    def __init__(self, name: str, addresses: str, process: int) -> None:
        self.here, self.there = addresses.format(1), addresses.format(2)
        self.devices = (f"fd{name}h{os.getpid() % 10000}", f"fd{name}t")
        self._within = ("nsenter", "-t", str(process), "-n")
        near, far = self.devices
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(process))
        for within, address, device in (((), self.here, near), (self._within, self.there, far)):
            run(*within, "ip", "address", "add", f"{address}/24", "dev", device)
            run(*within, "ip", "link", "set", device, "up")

    def cut(self, ways: str) -> None:
        """ways: `to` the prefill instance, `from` it, or both, in one text."""
        near, far = self.devices
        lost = ("lladdr", NOBODY, "nud", "permanent", "dev")
        if "to" in ways:
            run("ip", "neighbour", "replace", self.there, *lost, near)
        if "from" in ways:
            run(*self._within, "ip", "neighbour", "replace", self.here, *lost, far)

    def heal(self) -> None:
        near, far = self.devices
        run("ip", "neighbour", "flush", "dev", near, "nud", "permanent")
        run(*self._within, "ip", "neighbour", "flush", "dev", far, "nud", "permanent")

    def slow(self, rate: str, limit: str = "64kb") -> None:
        """What comes from the prefill instance; beyond `limit` waiting bytes packets are lost."""
        run(*self._tc("replace"), "tbf", "rate", rate, "burst", "16kb", "limit", limit)

    def num_lost(self) -> int:
        found = re.search(
            r"dropped (\d+)",
            run(*self._within, "tc", "-s", "qdisc", "show", "dev", self.devices[1]),
        )
        return int(found[1]) if found else 0

    def at_full_speed(self) -> None:
        subprocess.run(self._tc("delete"), check=False, capture_output=True)

    def _tc(self, verb: str) -> tuple[str, ...]:
        return (*self._within, "tc", "qdisc", verb, "dev", self.devices[1], "root")


class Networks(Apart):
    """Two instances with a network between them."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        try:
            own, place = (Path(f"/proc/{one}/ns/net") for one in ("self", self._holder.pid))
            wait_for(lambda: place.readlink() != own.readlink(), "the namespace")
            process = self._holder.pid
            self.http, self.blocks = Link("h", HTTP, process), Link("b", BLOCKS, process)
        except subprocess.CalledProcessError as error:
            self._end()
            pytest.skip(f"no virtual networks here: {error.stderr.strip()}")
        tcp = ("--kv-transport", "tcp", "--kv-transport-address")
        within = ("nsenter", "-t", str(process), "-n")
        self.prefill = server(
            "prefill", *tcp, self.blocks.there, host=self.http.there, within=within
        )
        self.decode = server("decode", *tcp, self.blocks.here)
        self.route()

    def stop(self) -> None:
        super().stop()
        self._end()

    def _end(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(f"it takes root, and {', '.join(missing) or 'nothing else'}")
    made = Networks()
    yield made
    made.stop()


@pytest.fixture
def apart(networks: Networks) -> Iterator[Networks]:
    """Links are whole before and afterwards."""
    yield networks
    for link in (networks.http, networks.blocks):
        link.heal()
        link.at_full_speed()
    networks.wait()


def host_tier(process: CommandProcess) -> bytes:
    """The host tier of a server, read from outside."""
    found = [process.process.pid]
    for pid in found:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        found += [int(child) for listed in tasks for child in listed.read_text().split()]
    for pid in found:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "fd-host-tier" in line:
                first, last = (int(number, 16) for number in line.split()[0].split("-"))
                with Path(f"/proc/{pid}/mem").open("rb") as memory:
                    memory.seek(first)
                    return memory.read(last - first)
    raise AssertionError("no host tier")


numbers = itertools.count()


def begin(
    apart: Networks, threads: ThreadPoolExecutor, limit: str = "64kb"
) -> tuple[dict[str, Any], Any]:
    """A long prompt's request, of which some blocks have come and most have not."""
    body = text_body(f"network {next(numbers)}", 30)
    before = host_tier(apart.decode)
    apart.blocks.slow("4mbit", limit)
    asking = threads.submit(ask, apart.router.url, TEXT, body)
    wait_for(lambda: host_tier(apart.decode) != before, "blocks to come")
    return body, asking


@pytest.mark.parametrize("ways", ["to", "from", "to and from"])
@pytest.mark.parametrize("heals", ["soon", "late"])
def test_the_network_is_cut_while_blocks_come(apart: Networks, ways: str, heals: str) -> None:
    """F4 and F5: before or after the transfer was given up. No byte comes late."""
    with ThreadPoolExecutor(1) as threads:
        body, asking = begin(apart, threads)
        apart.blocks.cut(ways)
        cut_s = time.monotonic()
        if heals == "soon":
            time.sleep(0.4)
            apart.blocks.heal()
            apart.blocks.at_full_speed()
        answer = asking.result()
        # A second without progress, a quarter for the question, and the answer on a busy machine.
        assert time.monotonic() - cut_s < 15
    check_idle(apart.decode)
    before = host_tier(apart.decode)
    apart.blocks.heal()
    apart.blocks.at_full_speed()
    time.sleep(2)
    assert host_tier(apart.decode) == before, "bytes came late"
    assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)
    check_idle(apart.prefill, apart.decode)
    num_before = taken(apart.decode)
    ask(apart.router.url, TEXT, text_body(f"healed {ways} {heals}"))
    assert taken(apart.decode) == num_before + 1, "it is used again"


def test_both_links_are_cut(apart: Networks) -> None:
    """F4: the router, too, finds the prefill instance lost."""
    with ThreadPoolExecutor(1) as threads:
        body, asking = begin(apart, threads)
        for link in (apart.blocks, apart.http):
            link.cut("to and from")
        answer = asking.result()
    wait_for(lambda: apart.router.listed("state")[apart.prefill.name] != "ready", "the loss")
    alone = text_body("cut off")
    assert said(ask(apart.router.url, TEXT, alone)) == said(ask(apart.decode.url, TEXT, alone))
    assert said(ask(apart.decode.url, TEXT, body)) == said(answer)
    check_idle(apart.decode)


def test_a_slow_network_slows_nobody_else(apart: Networks) -> None:
    """F6: an answer that is being written goes on while a prompt comes at 4 Mbit/s. Who asks
    the other instance whether it is there waits half a second behind the blocks."""
    times: list[float] = []
    end = threading.Event()

    def stream() -> None:
        body = {"prompt": "Go on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", apart.decode.url + TEXT, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                times.append(time.monotonic())
                if end.is_set() or "[DONE]" in line:
                    return

    with ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(stream)
        wait_for(lambda: len(times) > 20, "tokens")
        num_before, first = taken(apart.decode), len(times)
        body, asking = begin(apart, threads, limit="256kb")
        answer = asking.result()
        last = len(times)
        end.set()
        streaming.result()
    assert taken(apart.decode) == num_before + 1, "what moves is waited for"
    gaps = [later - before for before, later in pairwise(times[first:last])]
    assert len(gaps) > 50 and max(gaps) < 1.0
    assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)


def test_packets_that_are_lost_are_sent_again(apart: Networks) -> None:
    """F7: a queue that is too short drops some of every hundred packets."""
    num_before = taken(apart.decode)
    apart.blocks.slow("20mbit", limit="20kb")
    bodies = [text_body(f"lost {number}", 30) for number in range(3)]
    answers = [ask(apart.router.url, TEXT, body) for body in bodies]
    assert apart.blocks.num_lost() > 0
    assert taken(apart.decode) == num_before + len(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)
    check_idle(apart.prefill, apart.decode)
