"""The request scheduler: which instance gets a request. (Who runs this step is the batch
scheduler.)

Both sides of one object: the front end puts requests and gets deltas, an engine gets requests and
puts deltas. Delivery is at-least-once with at-most-once effect: a request carries the number of its
attempt; deltas of an older attempt are dropped by the scheduler, never shown to a client. With
`SchedulerCapabilities.leases` every hand-over is a lease, and a lost one starts the next attempt.

The front end calls put_requests, get_results, abort and loads; an engine calls get_requests,
put_results, get_aborts and report_load. Which process constructs the object follows from
`SchedulerCapabilities.shared_queue`:

* Without it there is one object, in the engine process. Front ends reach it through the engine's
  sockets, so they depend on that process.
* With it every API server process and every engine process constructs its own from equal options;
  the engine's has `instance` and `epoch` filled in. Front ends call theirs in threads that may
  wait, an engine calls get_requests, put_results and get_aborts between steps and report_load from
  another thread, so these four must not wait for a server. How output gets from the engine's object
  to the front end's is the driver's business, and so is proving to each other who they are. The
  death of an engine ends no front end and no stream by itself: the driver answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fastdeploy_core.config import RequestSchedulerConfig as RequestSchedulerConfig
from fastdeploy_core.errors import FastDeployError, InvalidRequest, QueueFull, Unavailable
from fastdeploy_core.types import InstanceRole, Request, RequestOutputDelta, TokenDeltas


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an engine reports of itself."""

    instance: str
    epoch: int  # random 64 bit, new at every start: a restarted instance is another one
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # see Capacity
    num_total_blocks: int = 0
    role: InstanceRole = InstanceRole.MIXED
    draining: bool = False
    # Seconds since the report came. The scheduler fills it in `loads`, by a clock of its own (a
    # queue's server has one for all), so clocks of two hosts are never compared.
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can take now."""

    num_requests: int
    # KV blocks that a new request could get now: free or only cached, less what the requests still
    # need that the engine has taken already. A request needs its prompt's blocks and one more for
    # its answer; fewer where prefixes are shared, which only the engine knows.
    num_free_blocks: int
    block_size: int  # tokens of a block
    num_tokens: int  # of prompts
    num_tenants: int = 0  # so many requests more, each of a tenant of whom the engine has nothing


@dataclass(frozen=True, slots=True)
class SchedulerQuestion:
    """Asked of `fd_scheduler_requirements`."""

    config: RequestSchedulerConfig
    role: InstanceRole = InstanceRole.MIXED


@dataclass(frozen=True, slots=True)
class SchedulerCapabilities:
    """What a request scheduler promises beyond the methods. Unknown means unsupported."""

    shared_queue: bool = False  # objects with equal options but another `instance` serve one queue
    # What an instance holds that was silent for lease_s is handed out again under a new attempt; if
    # part of its output was shown already, it may be answered with WorkerError instead. For queues
    # that outlive an engine: a scheduler in the engine's own process has nobody to take over.
    leases: bool = False
    # Waiting requests survive the processes that put them, `close` included. What nobody reads any
    # more is run or reported, as the driver says, and its id may be put again by another front end.
    durable: bool = False


def error_of(reason: str) -> FastDeployError:
    """The error that a reason of RequestScheduler.put_requests stands for."""
    kind, _, text = reason.partition(": ")
    if kind == "queue full":
        return QueueFull(reason)
    return Unavailable(text) if kind == "unavailable" else InvalidRequest(reason)


@runtime_checkable
class RequestScheduler(Protocol):
    """Constructed as `Driver(RequestSchedulerConfig)`. Thread-safe; nothing blocks longer than
    the timeout given. A request has one id for its whole life; the id may be used again only after
    its last delta was fetched."""

    name: str
    contract: tuple[int, int]
    capabilities: SchedulerCapabilities

    def put_requests(self, requests: Sequence[Request]) -> list[str | None]:
        """Queue requests; one entry each: None, or why it was refused ("queue full: ...",
        "duplicate request id: ...", "unavailable: ..." when the queue cannot be reached; the text
        is shown to clients). Accepting is all or nothing per request, never per batch."""
        ...

    def get_requests(self, capacity: Capacity, timeout_s: float = 0.0) -> list[Request]:
        """Take at most what fits, smaller priority first and oldest first within one. A queue with
        one engine need not look at blocks: what does not fit waits there as well. The request
        comes with its current `attempt`; with leases, each hand-over begins one and raises that
        number, and an engine that still runs an older attempt drops it for the newer one. A request
        that waited longer than ttl_s is not handed out but answered with a finished delta of
        error_type RequestTimeout."""
        ...

    def put_results(self, outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> None:
        """Publish deltas, which renews the leases of their requests. Deltas of a stale attempt, of
        an unknown or finished request, and repeated positions are dropped. TokenDeltas are many
        deltas in short, `types.each_delta` gives them one by one."""
        ...

    def get_results(self, timeout_s: float = 0.0) -> list[RequestOutputDelta | TokenDeltas]:
        """Deltas for requests put through this object, each once and in position order.

        A delta's position is the number of deltas of its request before it, and its num_deltas how
        many it counts for: deltas that are merged for a slow reader keep the first one's position
        and add up their numbers, so the next position is position + num_deltas."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel wherever the request is; idempotent; unknown ids are ignored, and an abort that
        arrives before its request cancels that request. A `types.branch_id` ends one sequence of a
        running request: it is passed on to the request's engine, which answers it."""
        ...

    def get_aborts(self) -> list[str]:
        """Requests this engine has taken and must stop, each reported once; branch ids among them.
        None of them is a request that the engine has been handed again since: abort first, then
        hand out."""
        ...

    def report_load(self, load: InstanceLoad) -> None:
        """Heartbeat of an engine, at least eight times per lease_s; renews its leases. One that is
        draining asks for nothing more: what it was not given yet goes to others.

        Leases belong to (instance, epoch), RequestSchedulerConfig's from the first get_requests on:
        what an earlier epoch of the instance held is lost as soon as a new one takes or reports."""
        ...

    def loads(self) -> list[InstanceLoad]:
        """Live instances as last seen, each with the age of its report."""
        ...

    def close(self) -> None:
        """Stop threads, give back leases; idempotent."""
        ...
