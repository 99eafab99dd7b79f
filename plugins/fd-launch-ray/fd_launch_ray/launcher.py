"""Servers as processes on the nodes of a Ray cluster. Ray places and watches them; requests go from
the router to the servers by HTTP, never through Ray."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from fd_launch.processes import check_options, command_of, end_all
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fastdeploy_core.contracts.small import InstanceSpec
from fastdeploy_core.errors import ConfigError, WorkerError

LOST = 1  # the exit code of a server whose node or actor is gone
ANSWER_S = 30.0
RETRY_S = 1.0
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class _Node:
    """An actor: runs one server on its node, and dies with it."""

    def __init__(self, spec: InstanceSpec) -> None:
        self._host: str = ray.util.get_node_ip_address()
        # Ray kills an actor without a word, so the kernel ends the server.
        self._process = subprocess.Popen(  # noqa: S603
            command_of(spec, self._host), preexec_fn=_end_with_parent
        )

    def host(self) -> str:
        """Where the server listens."""
        return self._host

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float) -> None:
        """Ends the server."""
        end_all([self._process], grace_s)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class RayLauncher:
    """One placement group with a bundle for each server: all get their place, or none starts."""

    name = "ray"
    contract = (1, 2)
    is_head = True

    def __init__(self, options: Mapping[str, str]) -> None:
        """address: of the cluster, default: as Ray finds it; strategy: of the placement group;
        cpus: of each server; timeout: seconds until all have a place."""
        check_options(self.name, options, ("address", "strategy", "cpus", "timeout"))
        self._strategy = options.get("strategy", "SPREAD")
        try:
            self._cpus = float(options.get("cpus", "1"))
            self._timeout_s = float(options.get("timeout", "60"))
        except ValueError:
            raise ConfigError("launcher ray: cpus and timeout are numbers") from None
        if self._strategy not in ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"):
            raise ConfigError(
                f"launcher ray: strategy {self._strategy!r}; there are SPREAD, STRICT_SPREAD, PACK "
                "and STRICT_PACK"
            )
        self._address = options.get("address", "auto")
        self._specs: dict[str, tuple[InstanceSpec, int]] = {}  # with their bundles
        self._actors: dict[str, Any] = {}
        self._group: Any = None

    def start(self, specs: Sequence[InstanceSpec]) -> list[str]:
        """Waits until the cluster has room for all of them."""
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self._address, log_to_driver=True, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"no Ray cluster at {self._address}: {error}") from None
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end this process at once
        bundles = [{"CPU": self._cpus, "GPU": float(spec.num_devices)} for spec in specs]
        bundles = [{name: n for name, n in one.items() if n} for one in bundles]
        self._group = placement_group(bundles, strategy=self._strategy)
        if not self._group.wait(self._timeout_s):
            there = ray.cluster_resources()
            self.stop(0)
            raise WorkerError(
                f"the cluster has no room for {len(specs)} servers of {bundles[0]} within "
                f"{self._timeout_s:g} s ({self._strategy}); all its nodes together have "
                f"{there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU"
            )
        self._specs = {spec.name: (spec, place) for place, spec in enumerate(specs)}
        try:
            return [self.restart(spec.name) for spec in specs]
        except WorkerError:
            self.stop(0)
            raise

    def exit_code(self, name: str) -> int | None:
        """LOST where its node or actor is gone."""
        try:
            code: int | None = ray.get(self._actors[name].exit_code.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            return LOST
        return code

    def restart(self, name: str) -> str:
        """In its bundle, which Ray moves to another node when that one is lost."""
        spec, place = self._specs[name]
        if (before := self._actors.pop(name, None)) is not None:
            ray.kill(before)
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        actor = ray.remote(_Node).options(
            num_cpus=self._cpus, num_gpus=spec.num_devices, scheduling_strategy=where
        )
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._actors[name] = node = actor.remote(spec)
            try:
                left_s = max(0.0, deadline - time.monotonic())
                return f"{ray.get(node.host.remote(), timeout=left_s)}:{spec.port}"
            except ray.exceptions.ActorDiedError as error:
                # Ray may still count on a node that has just been lost.
                if time.monotonic() + RETRY_S > deadline:
                    raise WorkerError(f"{name} cannot be started: {error}") from None
                time.sleep(RETRY_S)
            except ray.exceptions.RayError as error:
                ray.kill(node)  # else it would start later, where nobody looks for it
                raise WorkerError(f"{name} cannot be started on the cluster: {error}") from None

    def stop(self, grace_s: float) -> None:
        """Ends servers, actors and the placement group."""
        ends = [actor.stop.remote(grace_s) for actor in self._actors.values()]
        for end in ends:
            try:
                ray.get(end, timeout=grace_s + ANSWER_S)
            except ray.exceptions.RayError:
                continue  # its node is gone, and the server with it
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
