"""The contract is what plugins were built against: it changes only together with its number.

    python tests/contract/test_snapshot.py      # after bumping CONTRACT: write snapshot.json anew

snapshot.json holds every method of every Protocol and of every base class of devices/, every field
of every record, every hook and operation. A difference under the same CONTRACT fails.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import fastdeploy_core.contracts as contracts
import fastdeploy_core.devices as devices
from fastdeploy_core.contracts.base import CONTRACT, KINDS
from fastdeploy_core.contracts.ops import OPERATIONS

SNAPSHOT = Path(__file__).with_name("snapshot.json")


def describe_contract() -> dict[str, Any]:
    """Everything a plugin can see, as plain data in a stable order."""
    found: dict[str, Any] = {}
    for info in (
        *pkgutil.iter_modules(contracts.__path__, f"{contracts.__name__}."),
        *pkgutil.iter_modules(devices.__path__, f"{devices.__name__}."),
    ):
        module = importlib.import_module(info.name)
        short = info.name.rpartition(".")[2]
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value):
                found[f"{short}.{name}"] = _class(value)
            elif inspect.isfunction(value) and name.startswith("fd_"):
                found[f"hook {name}"] = str(inspect.signature(value))
    return {
        "kinds": {k.name: [k.group, k.protocol, k.versioned, k.shared] for k in KINDS.values()},
        "operations": OPERATIONS,
        "items": dict(sorted(found.items())),
    }


def _class(value: type) -> dict[str, Any]:
    described: dict[str, Any] = {}
    if issubclass(value, enum.Enum):
        return {"values": [m.value for m in value]}
    if dataclasses.is_dataclass(value):
        described["fields"] = [
            f"{f.name}: {f.type}" + (" = ..." if _has_default(f) else "")
            for f in dataclasses.fields(value)
        ]
    elif attributes := inspect.get_annotations(value):
        described["attributes"] = [f"{k}: {v}" for k, v in attributes.items()]
    methods = {
        name: str(inspect.signature(member))
        for name, member in vars(value).items()
        if inspect.isfunction(member)
        and (not name.startswith("_") or (name == "__init__" and _is_own_init(value)))
    }
    if methods:
        described["methods"] = dict(sorted(methods.items()))
    return described


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _is_own_init(value: type) -> bool:
    return (
        not dataclasses.is_dataclass(value)
        and "Protocol" not in value.__init__.__qualname__
        and (value.__init__.__qualname__.startswith(value.__name__))
    )


def render() -> str:
    return json.dumps({"contract": list(CONTRACT), **describe_contract()}, indent=1) + "\n"


def test_contract_changes_only_with_its_number():
    stored = json.loads(SNAPSHOT.read_text("utf-8"))
    now = json.loads(render())
    if stored["contract"] != now["contract"]:
        raise AssertionError(
            f"CONTRACT is {now['contract']}, the snapshot is of {stored['contract']}; "
            "run: python tests/contract/test_snapshot.py, and note the change for plugin authors"
        )
    changed = sorted(
        key
        for section in ("kinds", "operations", "items")
        for key in stored[section].keys() | now[section].keys()
        if stored[section].get(key) != now[section].get(key)
    )
    assert not changed, (
        f"the contract changed under the same number: {', '.join(changed)}; plugins built for "
        f"{CONTRACT[0]}.{CONTRACT[1]} may break: bump CONTRACT in contracts/base.py, then run "
        "python tests/contract/test_snapshot.py"
    )


def test_snapshot_sees_protocols_hooks_fields_and_operations():
    items = describe_contract()["items"]
    assert "submit" in items["kv_transport.KVTransport"]["methods"]
    assert "name: str" in items["device.DeviceBackend"]["attributes"]
    assert "secret: bytes" in items["kv_transport.TransportOptions"]["fields"]
    assert items["kv_transport.CancelResult"] == {"values": ["safe", "unsafe"]}
    assert "__init__" in items["attention.AttentionBackend"]["methods"]
    assert "question" in items["hook fd_device_probe"]
    assert all(KINDS[k].protocol.split(":")[-1] in str(items) for k in KINDS if KINDS[k].protocol)


if __name__ == "__main__":
    SNAPSHOT.write_text(render(), "utf-8")
    sys.stdout.write(f"wrote {SNAPSHOT.name}\n")
