"""The contract is what plugins were built against: it changes only together with its number.

    python tests/contract/test_snapshot.py      # after bumping CONTRACT: write snapshot.json anew

snapshot.json holds every method of every Protocol and of every base class of devices/ and
fd-accelerator, every field of every record, every hook and operation. A difference under the
same CONTRACT fails. It also holds what layers/, models/ and fd-quant-formats name in `__all__`.
Plugins call these and do not implement them, so they may grow under the same number.
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
from types import ModuleType
from typing import Any

import fd_accelerator
import fd_quant_formats
import msgspec

import fastdeploy_core.contracts as contracts
import fastdeploy_core.devices as devices
import fastdeploy_core.layers as layers
import fastdeploy_core.models as models
import fastdeploy_core.types as types
from fastdeploy_core.contracts.base import CONTRACT, KINDS
from fastdeploy_core.contracts.ops import OPERATIONS, QUANTIZED_OPERATIONS
from fastdeploy_testing.conformance.signatures import signature

SNAPSHOT = Path(__file__).with_name("snapshot.json")
CALLED = (layers, models, fd_quant_formats)
WRITE = "python tests/contract/test_snapshot.py"


def _short(room: ModuleType) -> str:
    return room.__name__.rpartition(".")[2]


_CALLED = tuple(f"{_short(room)}." for room in CALLED)


def describe_contract() -> dict[str, Any]:
    """Everything a plugin can see, as plain data in a stable order."""
    found: dict[str, Any] = {}
    for info in (
        *pkgutil.walk_packages(contracts.__path__, f"{contracts.__name__}."),
        *pkgutil.iter_modules(devices.__path__, f"{devices.__name__}."),
        *pkgutil.iter_modules(fd_accelerator.__path__, f"{fd_accelerator.__name__}."),
        *pkgutil.iter_modules(types.__path__, f"{types.__name__}."),
    ):
        if info.name.endswith("_place"):  # what fd-accelerator builds its bases of
            continue
        module = importlib.import_module(info.name)
        short = info.name.rpartition(".")[2]
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value):
                found[f"{short}.{name}"] = _class(value)
            elif inspect.isfunction(value) and name.startswith("fd_"):
                found[f"hook {name}"] = str(inspect.signature(value))
    for room in CALLED:
        for name in room.__all__:
            found |= _public(_short(room), name, getattr(room, name, None))
    return {
        "kinds": {k.name: [k.group, k.protocol, k.versioned, k.shared] for k in KINDS.values()},
        "operations": {
            o.name: str(signature(o))
            for o in (*OPERATIONS.values(), *QUANTIZED_OPERATIONS.values())
        },
        "items": dict(sorted(found.items())),
    }


def _public(room: str, name: str, value: Any) -> dict[str, Any]:
    """What a room names in `__all__`; a module there is public with all names of its own."""
    if value is None:
        value = importlib.import_module(f"fastdeploy_core.{room}.{name}")
    if not inspect.ismodule(value):
        return {f"{room}.{name}": _called(value)}
    return {
        f"{room}.{name}.{key}": _called(part)
        for key, part in vars(value).items()
        if not key.startswith("_")
        and (inspect.isclass(part) or inspect.isfunction(part))
        and part.__module__ == value.__name__
    }


def _called(value: Any) -> dict[str, Any]:
    """A class or function that plugins call: its parameters one by one, since it may get more."""
    if not inspect.isclass(value):
        return {"calls": {"": _parameters(value)}}
    described = _class(value)
    names = [*described.pop("methods", {}), *(["__call__"] if "__call__" in vars(value) else [])]
    calls = {name: _parameters(vars(value)[name]) for name in sorted(names)}
    return described | ({"calls": calls} if calls else {})


def _parameters(function: Any) -> list[str]:
    """In order, keyword-only ones with a star before their name. A default is only told to be
    there: that of a record changes whenever the record gets a field."""
    signature = inspect.signature(function)
    found = [
        ("*" if p.kind is p.KEYWORD_ONLY else "")
        + f"{p.name}: {p.annotation}"
        + ("" if p.default is p.empty else " = ...")
        for p in signature.parameters.values()
    ]
    return [*found, f"-> {signature.return_annotation}"]


def _class(value: type) -> dict[str, Any]:
    described: dict[str, Any] = {}
    if issubclass(value, enum.Enum):
        return {"values": [m.value for m in value]}
    if issubclass(value, msgspec.Struct):
        described["fields"] = [
            f"{field.name}: {value.__annotations__.get(field.name, field.type)}"
            + ("" if field.required else " = ...")
            for field in msgspec.structs.fields(value)
        ]
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
            f"run: {WRITE}, and note the change for plugin authors"
        )
    changed = {
        key
        for section in ("kinds", "operations", "items")
        for key in stored[section].keys() | now[section].keys()
        if stored[section].get(key) != now[section].get(key)
    }
    broken = {name for name in broken_by(stored, now) if name.startswith(_CALLED)}
    grown = {key for key in changed if key.startswith(_CALLED)}
    changed = {key for key in changed if not key.startswith(_CALLED)} | broken
    assert not changed, (
        f"the contract changed under the same number: {', '.join(sorted(changed))}; plugins built "
        f"for {CONTRACT[0]}.{CONTRACT[1]} may break: bump CONTRACT in contracts/base.py, then run "
        f"{WRITE}"
    )
    assert not grown, f"plugins may call more than the snapshot knows; run: {WRITE}"


def broken_by(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What a minor may not do although `after` does it, by name."""
    found = []
    for section in ("kinds", "operations", "items"):
        for key, old in before[section].items():
            new = after[section].get(key)
            if new is None or (section != "items" and new != old):
                found.append(key)
            elif isinstance(old, dict):
                found += [f"{key}.{part}" for part in old if not _extends(part, old, new)]
                more = new.keys() - old.keys() - {"fields", "calls"}
                found += [f"{key}.{part}" for part in more]
            elif old != new:
                found.append(key)
    return found


def _extends(part: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    if part == "attributes" and "fields" in old:  # a msgspec record's fields, named twice
        return True
    if part == "calls":
        return all(_takes(call, new.get(part, {}).get(name)) for name, call in old[part].items())
    if part != "fields":
        return bool(new.get(part) == old[part])
    fields, before = new.get(part, []), old[part]
    added = fields[len(before) :]
    return fields[: len(before)] == before and all(f.endswith(" = ...") for f in added)


def _takes(old: list[str], new: list[str] | None) -> bool:
    """Whether what calls a function of these parameters may call the new one."""
    if new is None or new[-1] != old[-1]:
        return False
    before = [p for p in old if not p.startswith("*")][:-1]
    named = {p for p in old if p.startswith("*")}
    added = [p for p in new[:-1] if p not in old]
    return (
        [p for p in new if not p.startswith("*")][: len(before)] == before
        and named <= set(new)
        and all(p.endswith(" = ...") for p in added)
    )


def test_what_plugins_call_may_take_more_and_nothing_else():
    def layer(*parameters: str, name: str = "run") -> dict[str, Any]:
        calls = {name: [*parameters, "-> Tensor"]}
        return {"kinds": {}, "operations": {}, "items": {"layers.Layer": {"calls": calls}}}

    before = layer("self", "x: Tensor", "*bias: bool = ...")
    for allowed in (
        before,
        layer("self", "x: Tensor", "rows: Tensor = ...", "*bias: bool = ..."),
        layer("self", "x: Tensor", "*bias: bool = ...", "*eps: float = ..."),
    ):
        assert broken_by(before, allowed) == []
    for refused in (
        layer("self", "*bias: bool = ..."),
        layer("self", "x: Tensor"),
        layer("self", "rows: Tensor = ...", "x: Tensor", "*bias: bool = ..."),
        layer("self", "x: Tensor", "rows: Tensor", "*bias: bool = ..."),
        layer("self", "x: Tensor", "*bias: bool = ...", name="go"),
    ):
        assert broken_by(before, refused) == ["layers.Layer.calls"]
    assert broken_by(before, {**before, "items": {}}) == ["layers.Layer"]


def test_a_minor_may_add_and_nothing_else():
    def contract(**items: Any) -> dict[str, Any]:
        return {"kinds": {"device": ["g"]}, "operations": {"linear": "(x)"}, "items": items}

    before = contract(A={"fields": ["a: int", "b: int = ..."]}, P={"methods": {"run": "()"}})
    longer = ["a: int", "b: int = ...", "c: int = ..."]
    for allowed in (
        before,
        contract(A={"fields": longer}, P={"methods": {"run": "()"}}, Q={"methods": {}}),
    ):
        assert broken_by(before, allowed) == []
    struct = {"fields": ["a: int"], "attributes": ["a: int"]}
    longer_struct = {"fields": ["a: int", "b: int = ..."], "attributes": ["a: int", "b: int"]}
    assert broken_by(contract(S=struct), contract(S=longer_struct)) == []
    same = before["items"]
    for items, named in (
        ({**same, "A": {"fields": ["a: int"]}}, "A.fields"),
        ({**same, "A": {"fields": [*same["A"]["fields"], "c: int"]}}, "A.fields"),
        ({**same, "A": {"fields": ["c: int = ...", *same["A"]["fields"]]}}, "A.fields"),
        ({**same, "P": {"methods": {"run": "()", "stop": "()"}}}, "P.methods"),
        ({**same, "P": {"methods": {"run": "(x)"}}}, "P.methods"),
        ({"P": same["P"]}, "A"),
    ):
        assert broken_by(before, contract(**items)) == [named]
    gone = {**before, "operations": {}}
    assert broken_by(before, gone) == ["linear"]


def test_snapshot_sees_protocols_hooks_fields_and_operations():
    items = describe_contract()["items"]
    assert "submit" in items["kv_transport.KVTransport"]["methods"]
    assert "name: str" in items["device.DeviceBackend"]["attributes"]
    assert "secret: bytes" in items["kv_transport.TransportOptions"]["fields"]
    assert items["kv_transport.CancelResult"] == {"values": ["safe", "unsafe"]}
    assert "__init__" in items["attention.AttentionBackend"]["methods"]
    assert "question" in items["hook fd_device_probe"]
    assert "*bias: bool = ..." in items["layers.ModelBuilder"]["calls"]["linear"]
    assert "models.decoder.DecoderLayer" in items and "models.reading.ConfigReader" in items
    assert "calls" in items["fd_quant_formats.quantize_fp8"]
    assert all(KINDS[k].protocol.split(":")[-1] in str(items) for k in KINDS if KINDS[k].protocol)


if __name__ == "__main__":
    written = json.loads(SNAPSHOT.read_text("utf-8"))
    if written["contract"][0] == CONTRACT[0] and written["contract"] != list(CONTRACT):
        broken = broken_by(written, json.loads(render()))
        if broken:
            raise SystemExit(f"a minor may only add; this takes a new major: {', '.join(broken)}")
    SNAPSHOT.write_text(render(), "utf-8")
    sys.stdout.write(f"wrote {SNAPSHOT.name}\n")
