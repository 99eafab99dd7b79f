"""Files and sockets in the private folder of one server's API server processes."""

from __future__ import annotations

from pathlib import Path


def door_path(folder: Path | str) -> str:
    """Path of the socket on which API servers receive their connections."""
    return f"{folder}/door"


def occupancy_path(folder: Path | str) -> Path:
    """Path of the table that says how busy each API server is."""
    return Path(folder) / "occupancy"


def engine_folder(folder: Path | str, engine: int) -> str:
    """Folder of one engine's sockets to API servers, inside the folder of all API servers."""
    return f"{folder}/engine{engine}"


def balance_path(folder: Path | str) -> Path:
    """Path of the numbers by which API servers choose an engine (balance.py)."""
    return Path(folder) / "balance"


def front_end_address(folder: Path | str, number: int) -> str:
    """Where one of several API servers receives messages of supervisor and engine."""
    return f"ipc://{folder}/front{number}"
