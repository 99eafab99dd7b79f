"""The kernel table: own cells, strangers' cells, the reference for the rest."""

from __future__ import annotations

import logging

import msgspec
import pytest

from fastdeploy_core.config.engine import DeviceConfig
from fastdeploy_core.contracts.ops import OPERATIONS, Deny
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.plugins.resolve import ResolvedPlugins
from tests.plugin_modules import core_entry, entry, module_writer

KERNELS = """
from fastdeploy_core.contracts.ops import Kernel
def reference(): return "reference"
def own(): return "own"
def special(): return "special"
def third(): return "third"
def is_wide(facts): return facts["head_dim"] >= 128
def breaks(facts): raise RuntimeError("no")
CPU = {"linear": "kernel_mod:reference", "greedy": "kernel_mod:reference",
       "sample": "kernel_mod:reference"}
CHIP = {"linear": "kernel_mod:own", "greedy": "kernel_mod:absent"}
THIRD = {"linear": Kernel("kernel_mod:special", "kernel_mod:is_wide"),
         "sample": Kernel("kernel_mod:third", "kernel_mod:breaks"), "extra_op": "kernel_mod:third"}
FAST = {"linear": Kernel("kernel_mod:special", objective="latency"), "greedy": "kernel_mod:own"}
LIST = ["linear"]
WRONG = {"linear": 3}
FULL = {"linear": "kernel_mod:own", "greedy": "kernel_mod:own", "sample": "kernel_mod:own"}
def swapped(weight): return weight[::-1]
ODD = {"linear_odd": "kernel_mod:reference", "linear_even": "kernel_mod:reference"}
OWN_ODD = {**FULL, "linear_even": Kernel("kernel_mod:own", prepare="kernel_mod:swapped")}
BEHIND = {**FULL, "linear_odd": Kernel("kernel_mod:own", behind={"greedy": "kernel_mod:special"})}
WRONG_BEHIND = {
    **FULL,
    "linear_odd": Kernel("kernel_mod:own", behind={"greedy": "kernel_mod:absent"}),
}
"""


@pytest.fixture
def resolved(tmp_path, monkeypatch):
    module_writer(tmp_path, monkeypatch)("kernel_mod", KERNELS)
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "0")

    def make(*entries):
        rows = [core_entry("kernels", "cpu", "kernel_mod:CPU"), *entries]
        return ResolvedPlugins(rows, {})

    return make


def ask(table):
    return {op: table[op]() for op in table.origins()}


CHIP = entry("kernels", "chip", "kernel_mod:CHIP", "fd-chip")
THIRD = entry("kernels", "chip", "kernel_mod:THIRD", "fd-third")


def test_missing_cells_come_from_the_reference_in_one_line(resolved, caplog):
    with caplog.at_level(logging.INFO):
        table = build_kernel_table("chip", {}, resolved=resolved(CHIP))
    assert ask(table) == {"linear": "own", "greedy": "reference", "sample": "reference"}
    assert table.origins()["linear"] == "fd-chip"
    assert table.origins()["sample"] == "fastdeploy-core"
    lines = [r.message for r in caplog.records if "reference kernels" in r.message]
    assert lines == ["device chip: 2 of 3 operations run on the reference kernels: greedy, sample"]


def test_kernel_that_cannot_be_imported_is_warned_of_and_replaced(resolved, caplog):
    build_kernel_table("chip", {}, resolved=resolved(CHIP))
    assert any("greedy" in r.message and "fd-chip 1.0" in r.message for r in caplog.records)


def test_no_fallback_names_what_is_missing(resolved):
    with pytest.raises(CapabilityError, match="greedy, sample"):
        build_kernel_table(
            "chip", {}, asked=DeviceConfig(allow_fallback=False), resolved=resolved(CHIP)
        )
    full = entry("kernels", "chip", "kernel_mod:FULL", "fd-chip")
    table = build_kernel_table(
        "chip", {}, asked=DeviceConfig(allow_fallback=False), resolved=resolved(full)
    )
    assert set(ask(table).values()) == {"own"}


@pytest.mark.parametrize(("width", "expected"), [(64, "own"), (128, "special")])
def test_predicate_decides_with_the_facts(resolved, width, expected):
    table = build_kernel_table("chip", {"head_dim": width}, resolved=resolved(CHIP, THIRD))
    assert table["linear"]() == expected


DENIED = """
from fastdeploy_core.contracts.ops import Deny, Kernel
DENY = Deny("wrong sums", dtypes=("float16",), sizes={"hidden_size": (4097, 8192)})
TABLE = {
    "linear": Kernel("denied_mod:linear", denies=(DENY, Deny("no such unit", ("float64",)))),
}
def linear():
    return "denied"
"""


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": "float16", "hidden_size": 8192}, "denied: wrong sums"),
        ({"dtype": "float16", "hidden_size": 4097}, "denied: wrong sums"),
        ({"dtype": "float64", "hidden_size": 1}, "denied: no such unit"),
        ({"dtype": "float16", "hidden_size": 4096}, ""),
        ({"dtype": "float16", "hidden_size": 8193}, ""),
        ({"dtype": "bfloat16", "hidden_size": 8192}, ""),
        ({"dtype": "float16"}, ""),
    ],
)
def test_denied_case_uses_the_next_kernel_and_says_why(
    resolved, tmp_path, monkeypatch, facts, reason
):
    module_writer(tmp_path, monkeypatch)("denied_mod", DENIED)
    denied = entry("kernels", "chip", "denied_mod:TABLE", "fd-a")
    table = build_kernel_table("chip", facts, resolved=resolved(CHIP, denied))
    assert table["linear"]() == ("own" if reason else "denied")
    cells = {c.distribution: c for c in table.cells if c.operation == "linear"}
    assert cells["fd-a"].is_used == (not reason)
    assert cells["fd-a"].reason == (reason or "denied_mod:linear")
    assert cells["fd-chip"].is_used == bool(reason)
    assert cells["fastdeploy-core"].reason.startswith("that of fd-")


def test_deny_list_names_sizes_that_there_are():
    with pytest.raises(ConfigError, match=r"hiden_size.*possible sizes: hidden_size"):
        Deny("wrong", sizes={"hiden_size": (1, 2)})
    with pytest.raises(ConfigError, match="a reason is needed"):
        Deny("")


def test_every_cell_has_one_verdict(resolved):
    table = build_kernel_table("chip", {"head_dim": 1}, resolved=resolved(CHIP, THIRD))
    used = [c.operation for c in table.cells if c.is_used]
    assert sorted(used) == sorted(set(used)) == sorted(table.functions)
    reasons = {(c.distribution, c.operation): c.reason for c in table.cells if not c.is_used}
    assert "cannot be loaded" in reasons["fd-chip", "greedy"]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [("latency", "special"), ("determinism", "own"), ("throughput", "own"), ("", "own")],
)
def test_cells_for_an_objective_are_used_for_it(resolved, objective, expected):
    fast = entry("kernels", "chip", "kernel_mod:FAST", "fd-a-fast")  # else the first by its name
    table = build_kernel_table(
        "chip", asked=DeviceConfig(kernel_objective=objective), resolved=resolved(CHIP, fast)
    )
    assert table["linear"]() == expected
    alone = build_kernel_table(
        "chip", asked=DeviceConfig(kernel_objective=objective), resolved=resolved(fast)
    )
    assert alone["linear"]() == "special", "better than none of the device's own"


def test_failing_predicate_means_no(resolved):
    table = build_kernel_table("chip", {"head_dim": 1}, resolved=resolved(CHIP, THIRD))
    assert table["sample"]() == "reference"
    assert table["extra_op"]() == "third", "a method's own operation needs no row in OPERATIONS"


def test_table_of_the_wrong_form_costs_its_own_cells_only(resolved, caplog):
    for target in ("LIST", "WRONG", "NOT_THERE"):
        bad = entry("kernels", "chip", f"kernel_mod:{target}", "fd-bad")
        table = build_kernel_table("chip", {}, resolved=resolved(CHIP, bad))
        assert table["linear"]() == "own"
    assert sum("fd-bad" in r.message for r in caplog.records) == 3


def test_reference_device_logs_no_fallback(resolved, caplog):
    with caplog.at_level(logging.INFO):
        table = build_kernel_table(
            "cpu", {}, asked=DeviceConfig(allow_fallback=False), resolved=resolved(CHIP)
        )
    assert set(ask(table).values()) == {"reference"} and not caplog.records


def test_unknown_operation_names_those_there_are(resolved):
    table = build_kernel_table("cpu", {}, resolved=resolved())
    with pytest.raises(KeyError, match="greedy, linear, sample"):
        table["nope"]
    assert "nope" not in table and "linear" in table


def test_the_real_reference_has_every_operation():
    from fastdeploy_core.plugins.drivers import lookup

    assert set(OPERATIONS) <= set(lookup("kernels", "cpu"))


def test_a_table_says_which_operations_it_has(resolved):
    table = build_kernel_table("cpu", {}, resolved=resolved())
    assert {o for o in OPERATIONS if o in table} == {"linear", "greedy", "sample"}
    assert msgspec.msgpack.encode(resolved())


ODD = (
    entry("kernels", "cpu", "kernel_mod:ODD", "fd-odd"),
    entry("kernels", "chip", "kernel_mod:OWN_ODD", "fd-chip"),
)


def test_operation_that_few_models_need_falls_back_when_a_layer_asks(resolved, caplog):
    caplog.set_level(logging.INFO)
    table = build_kernel_table("chip", resolved=resolved(*ODD))
    assert "linear_odd" in table and not table.fallbacks
    assert "linear_odd" not in caplog.text
    assert [table["linear_odd"](), table["linear_odd"]()] == ["reference", "reference"]
    assert table.fallbacks == ["linear_odd"]
    assert caplog.text.count("linear_odd") == 1 and "slower" in caplog.text


def test_operation_that_few_models_need_is_refused_only_when_asked_for(resolved):
    table = build_kernel_table(
        "chip", asked=DeviceConfig(allow_fallback=False), resolved=resolved(*ODD)
    )
    assert table["linear"]() == table["linear_even"]() == "own"
    with pytest.raises(CapabilityError, match=r"linear_odd.*--no-fallback"):
        table["linear_odd"]


def test_cell_lays_weights_out_as_it_wants_them(resolved):
    table = build_kernel_table("chip", resolved=resolved(*ODD))
    assert table.prepare("linear_even", "ab") == "ba"
    assert table.prepare("linear_odd", "ab") == "ab"
    reference = build_kernel_table("cpu", resolved=resolved(*ODD))
    assert reference.prepare("linear_even", "ab") == "ab" and not reference.fallbacks


def test_cell_does_what_stands_before_it(resolved):
    own = entry("kernels", "chip", "kernel_mod:BEHIND", "fd-chip")
    table = build_kernel_table("chip", resolved=resolved(ODD[0], own))
    found = table.behind("linear_odd", "greedy")
    assert found is not None and found() == "special"
    assert table.behind("linear_odd", "sample") is None
    assert table.behind("linear_even", "greedy") is None


def test_cell_that_cannot_do_what_it_says_is_left_out(resolved, caplog):
    own = entry("kernels", "chip", "kernel_mod:WRONG_BEHIND", "fd-chip")
    table = build_kernel_table("chip", resolved=resolved(ODD[0], own))
    assert table["linear_odd"]() == "reference"
    assert table.behind("linear_odd", "greedy") is None
    assert any("linear_odd" in r.message and "absent" in r.message for r in caplog.records)


COMPOSED = """
from fastdeploy_core.contracts.ops import Kernel
def norm(x): return x + 1
def own_norm(x): return x + 10
def product(x): return x * 2
def join(kernels):
    first, second = kernels["norm"], kernels["product"]
    return lambda x: second(first(x))
def broken(kernels): raise RuntimeError("no")
def at_once(x): return -x
CPU = {"norm": "kernel_mod:norm", "product": "kernel_mod:product",
       "both": Kernel("kernel_mod:join", composes=True)}
CHIP = {"norm": "kernel_mod:own_norm"}
FUSED = {"norm": "kernel_mod:own_norm", "both": "kernel_mod:at_once"}
BROKEN = {"norm": "kernel_mod:own_norm", "both": Kernel("kernel_mod:broken", composes=True)}
"""


@pytest.mark.parametrize(
    ("table", "result", "origin"),
    [
        ("CPU", 6, "fastdeploy-core"),
        ("CHIP", 24, "fastdeploy-core"),  # made of the device's own norm
        ("FUSED", -2, "fd-chip"),
        ("BROKEN", 24, "fastdeploy-core"),
    ],
)
def test_a_fused_operation_is_made_of_the_devices_own_kernels(
    tmp_path, monkeypatch, table, result, origin
):
    module_writer(tmp_path, monkeypatch)("kernel_mod", COMPOSED)
    device = "cpu" if table == "CPU" else "chip"
    rows = [core_entry("kernels", "cpu", "kernel_mod:CPU")]
    if device == "chip":
        rows.append(entry("kernels", "chip", f"kernel_mod:{table}", "fd-chip"))
    kernels = build_kernel_table(device, resolved=ResolvedPlugins(rows, {}))
    assert kernels["both"](2) == result
    assert kernels.origins()["both"] == origin


def test_a_composed_operation_is_no_fallback(tmp_path, monkeypatch):
    module_writer(tmp_path, monkeypatch)(
        "kernel_mod",
        COMPOSED + 'ALL = {"norm": "kernel_mod:own_norm", "product": "kernel_mod:product"}\n',
    )
    rows = [
        core_entry("kernels", "cpu", "kernel_mod:CPU"),
        entry("kernels", "chip", "kernel_mod:ALL", "fd-chip"),
    ]
    table = build_kernel_table(
        "chip", asked=DeviceConfig(allow_fallback=False), resolved=ResolvedPlugins(rows, {})
    )
    assert table["both"](2) == 24
