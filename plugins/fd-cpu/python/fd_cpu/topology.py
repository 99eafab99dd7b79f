"""Which processors a rank's threads use, from Linux's description of cores and memory nodes.

Weights and cache lie on the memory node of the thread that writes them first, so a rank that stays
on one node has its memory there.
"""

from __future__ import annotations

from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def processors_of(
    rank: int, num_ranks: int, allowed: list[int], topology: Path = TOPOLOGY
) -> list[int]:
    """The processors of a rank among the allowed ones: whole nodes if these can be divided evenly,
    else as many processors as the other ranks get; one of every core first."""
    nodes: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        nodes.setdefault(_node(cpu, topology), []).append(cpu)
    groups = [spread(cpus, topology) for _, cpus in sorted(nodes.items())]
    if len(groups) % num_ranks == 0:
        share = len(groups) // num_ranks
        return [cpu for group in groups[rank * share : (rank + 1) * share] for cpu in group]
    # Neighbouring processors share a core, so that ranks do not share one.
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(allowed):
        cores.setdefault((_node(cpu, topology), _core(cpu, topology)), []).append(cpu)
    in_line = [
        cpu for _, cpus in sorted(cores.items(), key=lambda c: (c[0][0], c[1])) for cpu in cpus
    ]
    share = len(in_line) // num_ranks
    return spread(in_line[rank * share : (rank + 1) * share], topology)


def spread(cpus: list[int], topology: Path = TOPOLOGY) -> list[int]:
    """One processor of every core first, then the others, which share a core with one of these."""
    first: list[int] = []
    others: list[int] = []
    seen: set[str] = set()
    for cpu in cpus:
        core = _core(cpu, topology)
        (others if core in seen else first).append(cpu)
        seen.add(core)
    return first + others


def _core(cpu: int, topology: Path) -> str:
    file = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return file.read_text() if file.is_file() else str(cpu)


def _node(cpu: int, topology: Path) -> str:
    """Name of the memory node; the same name for all processors if there is one node."""
    found = sorted((topology / f"cpu{cpu}").glob("node[0-9]*"))
    return f"{found[0].name.removeprefix('node'):0>6}" if found else ""
