"""Resolution: questions, verdicts, winners, and what travels to the workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fastdeploy_core.config import (
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    RequestSchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from fastdeploy_core.config.quantization import QuantizationSettings
from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.model import AttentionSpec, StateSpec
from fastdeploy_core.errors import (
    CapabilityError,
    ConfigError,
    ContractMismatch,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
    UnsupportedModel,
)
from fastdeploy_core.plugins.discovery import discover
from fastdeploy_core.plugins.manager import hook_manager
from fastdeploy_core.plugins.negotiate import ask_layer_drivers, decide
from fastdeploy_core.plugins.resolve import ResolvedPlugins, attention_questions, resolve
from tests.plugin_modules import core_entry, entry, module_writer

CONFIG = EngineConfig(model=ModelConfig(path=Path("m"), tokenizer_path=Path("m")))
GQA = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "float32")
MLA = AttentionSpec("mla", 4, 1, 48, 32, 0.2, "float32", kv_lora_rank=32, qk_rope_head_dim=16)

WINDOW = replace(GQA, window=8)

CORE_HOOKS = """
from fastdeploy_core.contracts import Accept, Candidate, Decline, hookimpl
@hookimpl
def fd_device_probe(question):
    return Candidate("cpu", Accept(1), {"tensor_library": "torch"})
@hookimpl
def fd_attention_backends(question):
    return [Candidate("reference", Accept(10))]
"""
CHIP_HOOKS = """
from fastdeploy_core.contracts import Accept, Candidate, Decline, Requirements, hookimpl
@hookimpl
def fd_device_probe(question):
    return Candidate("chip", {probe}, {{"tensor_library": "paddle"}})
@hookimpl
def fd_attention_backends(question):
    if question.spec.kind == "mla":
        return [Candidate("flash", Decline("no mla yet"))]
    assert question.device == "chip" and question.tensor_library == "paddle"
    return [Candidate("flash", Accept(150, "tuned"))]
@hookimpl
def fd_quantizer_for(question):
    if question.config.get("quant_method") == "fp3":
        return Candidate("fp3", Accept(1))
    if question.name == "both":
        return Candidate("both", Accept(1), {{"inner": "fp3,fp5"}})
    if question.name == "fp5":
        inner = {{"inner": "fp6"}}
        return Candidate("fp5", Decline("no") if question.config.get("bad") else Accept(1), inner)
@hookimpl
def fd_speculative_requirements(question):
    if question.method == "guess":
        return Requirements(notes=("guessing is on",), lookahead_tokens=5, key_lookahead=1)
    if question.method == "greedy":
        return Requirements(refusals=("it needs two heads",))
"""
DRIVERS = """
class Any:
    contract = (1, 0)
TABLE = {}
"""


@pytest.fixture
def world(tmp_path, monkeypatch, fd_plugins):
    """world(probe=...) -> inventory of a core and one chip plugin, modules importable."""
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "0")
    write = module_writer(tmp_path, monkeypatch)

    def make(*extra, probe='Accept(200, "2 chips")', chip=True):
        write("core_hooks", CORE_HOOKS)
        write("chip_hooks", CHIP_HOOKS.format(probe=probe))
        write("any_drivers", DRIVERS)
        own = [
            core_entry("hooks", "core", "core_hooks"),
            core_entry("device", "cpu", "any_drivers:Any"),
            core_entry("attention", "reference", "any_drivers:Any"),
            core_entry("scheduler", "local", "any_drivers:Any"),
            core_entry("kernels", "cpu", "any_drivers:TABLE"),
            core_entry("model", "Known", "any_drivers:Any"),
            core_entry("grammar", "lark", "any_drivers:Any"),
            core_entry("quantizer", "wint8", "any_drivers:Any"),
        ]
        theirs = [
            entry("hooks", "chip", "chip_hooks", "fd-chip"),
            entry("device", "chip", "any_drivers:Any", "fd-chip"),
            entry("attention", "flash", "any_drivers:Any", "fd-chip"),
            entry("kernels", "chip", "any_drivers:TABLE", "fd-chip"),
            entry("quantizer", "fp3", "any_drivers:Any", "fd-chip"),
            *(
                entry("quantizer", name, "any_drivers:Any", "fd-chip")
                for name in ("both", "fp5", "fp6")
            ),
            entry("speculative", "guess", "any_drivers:Any", "fd-chip"),
            entry("speculative", "greedy", "any_drivers:Any", "fd-chip"),
        ]
        return fd_plugins(*own, *(theirs if chip else []), *extra)

    return make


def with_device(**settings):
    return replace(CONFIG, device=DeviceConfig(**settings))


def test_core_alone(world):
    resolved = resolve(CONFIG, layers=[GQA], inventory=world(chip=False))
    assert (resolved.name("device"), resolved.name("attention")) == ("cpu", "reference")
    assert resolved.name("scheduler") == "local" and resolved.tensor_library == "torch"
    assert resolved.name("moe") == "" and resolved.names("grammar") == ["lark"]


def test_better_hardware_wins_and_brings_its_kernels(world):
    resolved = resolve(CONFIG, layers=[GQA, GQA], inventory=world())
    assert resolved.name("device") == "chip" and resolved.tensor_library == "paddle"
    assert resolved.name("attention") == "flash"
    assert {e.name for e in resolved.plugin_entries("kernels")} == {"chip", "cpu"}
    assert any("2 chips" in line for line in resolved.report())


def test_declining_hardware_is_left_alone(world):
    resolved = resolve(CONFIG, inventory=world(probe='Decline("no chip found")'))
    assert resolved.name("device") == "cpu"
    rows = {c.name: c for c in resolved.decisions[0].candidates}
    assert rows["chip"].reason == "no chip found" and not rows["chip"].accepted


def test_named_device_that_declines_is_an_error_with_its_reason(world):
    inventory = world(probe='Decline("driver 12 is too old")')
    with pytest.raises(CapabilityError, match="driver 12 is too old"):
        resolve(with_device(device="chip"), inventory=inventory)


def test_named_device_wins_over_a_better_one(world):
    assert resolve(with_device(device="cpu"), inventory=world()).name("device") == "cpu"


def test_named_device_needs_no_hook(world):
    quiet = entry("device", "quiet", "any_drivers:Any", "fd-quiet")
    resolved = resolve(with_device(device="quiet"), inventory=world(quiet))
    assert resolved.name("device") == "quiet"


def test_unknown_device_is_refused_before_anything_is_asked(world):
    with pytest.raises(PluginNotFound, match="installed: chip, cpu"):
        resolve(with_device(device="gpu9"), inventory=world())


def test_one_attention_driver_must_serve_every_shape(world):
    resolved = resolve(CONFIG, layers=[GQA, MLA], inventory=world())
    assert resolved.name("attention") == "reference"
    with pytest.raises(CapabilityError, match="no mla yet"):
        resolve(with_device(attention_backend="flash"), layers=[GQA, MLA], inventory=world())


def test_a_driver_of_vllm_is_told_and_what_is_installed_is_used(world, caplog):
    for name in ("FLASH_ATTN", "triton_attn"):
        resolved = resolve(with_device(attention_backend=name), layers=[GQA], inventory=world())
        assert resolved.name("attention") == "flash"
        assert f"--attention-backend {name} has no effect" in caplog.text
    assert resolve(with_grammar("xgrammar"), inventory=world()).grammar.name == "lark"
    assert "--guided-decoding-backend xgrammar has no effect" in caplog.text
    with pytest.raises(PluginNotFound, match="no attention driver 'FLASH_ATN'"):
        resolve(with_device(attention_backend="FLASH_ATN"), layers=[GQA], inventory=world())


def test_an_installed_driver_is_used_though_vllm_has_a_kernel_of_its_name(world, caplog):
    own = entry("attention", "flashinfer", "any_drivers:Any", "fd-own")
    asked = with_device(attention_backend="flashinfer")
    resolved = resolve(asked, layers=[GQA], inventory=world(own))
    assert resolved.name("attention") == "flashinfer"
    assert "has no effect" not in caplog.text


def test_driver_that_does_not_know_a_kind_of_layer_is_declined_before_it_is_asked(world):
    """Its plugin would accept: to it a window looks like full attention."""
    with pytest.raises(CapabilityError, match=r"flash.*does not declare window"):
        resolve(CONFIG, layers=[GQA, WINDOW], inventory=world())
    with pytest.raises(CapabilityError, match="flash declines: does not declare window"):
        resolve(with_device(attention_backend="flash"), layers=[WINDOW], inventory=world())
    assert resolve(CONFIG, layers=[GQA], inventory=world()).name("attention") == "flash"


def test_driver_that_declares_a_kind_of_layer_is_asked(world, tmp_path):
    wide = entry("attention", "wide", "wide_drivers:Wide", "fd-wide")
    (tmp_path / "wide_drivers.py").write_text(
        "from fastdeploy_core.contracts import Accept, Candidate, hookimpl\n"
        "class Wide:\n    contract = (1, 0)\n    features = frozenset({'window', 'sinks'})\n"
        "@hookimpl\ndef fd_attention_backends(question):\n"
        "    return [Candidate('wide', Accept(1))]\n"
    )
    inventory = world(wide, entry("hooks", "wide", "wide_drivers", "fd-wide"))
    resolved = resolve(CONFIG, layers=[WINDOW], inventory=inventory)
    assert resolved.name("attention") == "wide"
    rows = {row.name: row.reason for d in resolved.decisions for row in d.candidates}
    assert "does not declare window" in rows["flash"] and "window" in rows["reference"]
    with pytest.raises(CapabilityError, match=r"wide \(fd-wide\): does not declare softcap "):
        resolve(CONFIG, layers=[replace(WINDOW, softcap=30.0)], inventory=inventory)


STATE = StateSpec("delta", 2, 2, 8, 8, (16, 16, 16), 4, "float32")


def test_layers_that_keep_a_state_need_a_driver_of_their_own(world, tmp_path):
    with pytest.raises(CapabilityError, match=r"no state driver .* plain by pip install fd-models"):
        resolve(CONFIG, layers=[GQA, STATE], inventory=world())
    (tmp_path / "state_driver.py").write_text(
        "from fastdeploy_core.contracts import Accept, Candidate, hookimpl\n"
        "class Space:\n    contract = (1, 3)\n    features = frozenset({'space'})\n"
        "@hookimpl\ndef fd_state_backends(question):\n"
        "    return [Candidate('scan', Accept(1))]\n"
    )
    scan = entry("state", "scan", "state_driver:Space", "fd-scan")
    inventory = world(scan, entry("hooks", "scan", "state_driver", "fd-scan"))
    space = replace(STATE, kind="space")
    resolved = resolve(CONFIG, layers=[GQA, space, space], inventory=inventory)
    assert (resolved.name("state"), resolved.name("attention")) == ("scan", "flash")
    with pytest.raises(CapabilityError, match=r"scan \(fd-scan\): does not declare delta "):
        resolve(CONFIG, layers=[GQA, space, STATE], inventory=inventory)


def test_speculation_needs_a_state_driver_that_keeps_states_for_refused_drafts(world, tmp_path):
    for name, words in (("newest", "'delta'"), ("several", "'delta', 'kept'")):
        (tmp_path / f"{name}.py").write_text(
            "from fastdeploy_core.contracts import Accept, Candidate, hookimpl\n"
            f"class Driver:\n    contract = (1, 5)\n    features = frozenset({{{words}}})\n"
            "@hookimpl\ndef fd_state_backends(question):\n"
            f"    return [Candidate('{name}', Accept(question.spec.kept))]\n"
        )
    (newest,) = (
        (
            entry("state", name, f"{name}:Driver", f"fd-{name}"),
            entry("hooks", name, name, f"fd-{name}"),
        )
        for name in ("newest",)
    )
    config = replace(CONFIG, speculative=SpeculativeConfig("ngram", 2))
    with pytest.raises(CapabilityError, match=r"newest .*: does not declare kept "):
        resolve(config, layers=[GQA, STATE], inventory=world(*newest))
    resolve(CONFIG, layers=[GQA, STATE], inventory=world(*newest))


def test_plugin_may_answer_for_its_own_drivers_only(world, tmp_path, monkeypatch):
    (tmp_path / "thief.py").write_text(
        "from fastdeploy_core.contracts import Accept, Candidate, hookimpl\n"
        "@hookimpl\ndef fd_device_probe():\n    return Candidate('cpu', Accept(9999))\n"
        "@hookimpl\ndef fd_attention_backends():\n    return ['flash']\n"
    )
    inventory = world(entry("hooks", "thief", "thief", "fd-thief"))
    resolved = resolve(CONFIG, layers=[GQA], inventory=inventory)
    assert resolved.name("device") == "chip"
    assert any("fd-thief" in n and "not its own" in n for n in resolved.notes)
    assert any("fd-thief" in n and "not a Candidate" in n for n in resolved.notes)


def test_quantized_checkpoint_finds_its_reader(world):
    model = replace(CONFIG.model, hf_config={"quantization_config": {"quant_method": "fp3"}})
    resolved = resolve(replace(CONFIG, model=model), inventory=world())
    assert resolved.name("quantizer") == "fp3"


def test_quantized_checkpoint_without_reader_is_refused(world):
    model = replace(CONFIG.model, hf_config={"quantization_config": {"quant_method": "odd"}})
    with pytest.raises(UnsupportedModel, match=r"odd.*installed: both, fp3"):
        resolve(replace(CONFIG, model=model), inventory=world())


@pytest.mark.parametrize("method", ["gptq", "awq_marlin", "compressed-tensors"])
def test_a_known_reader_that_is_not_installed_is_named(world, method):
    stored = {"quantization_config": {"quant_method": method, "bits": 4}}
    model = replace(CONFIG.model, hf_config=stored)
    with pytest.raises(UnsupportedModel, match="run: pip install fd-quant-hub"):
        resolve(replace(CONFIG, model=model), inventory=world())


def test_a_format_whose_distribution_is_not_installed_is_answered_with_what_installs_it(world):
    model = replace(CONFIG.model, quantization="w4a8")
    with pytest.raises(PluginNotFound, match="pip install fd-quant-formats"):
        resolve(replace(CONFIG, model=model), inventory=world())
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = replace(CONFIG.model, hf_config={"quantization_config": stored})
    with pytest.raises(UnsupportedModel, match="run: pip install fd-quant-formats"):
        resolve(replace(CONFIG, model=model), inventory=world())


def test_quantizer_by_name(world):
    model = replace(CONFIG.model, quantization="fp3")
    assert resolve(replace(CONFIG, model=model), inventory=world()).name("quantizer") == "fp3"
    model = replace(CONFIG.model, quantization="fp4")
    with pytest.raises(PluginNotFound, match="fp4"):
        resolve(replace(CONFIG, model=model), inventory=world())


def test_quantizers_that_another_is_made_of_travel_with_it(world):
    """Workers load what was resolved and nothing else, so the parts must be among it."""
    model = replace(CONFIG.model, quantization="both")
    resolved = resolve(replace(CONFIG, model=model), inventory=world())
    assert set(resolved.names("quantizer")) == {"both", "fp3", "fp5", "fp6", "wint8"}
    assert resolved.name("quantizer") == "both"


def test_part_of_a_quantizer_that_declines_stops_start_up(world):
    asked = '{"quantization": "both", "bad": true}'
    model = replace(CONFIG.model, quantization=asked)
    with pytest.raises(CapabilityError, match="both is made of fp5"):
        resolve(replace(CONFIG, model=model), inventory=world())


def test_stranger_among_the_parts_of_a_quantizer_is_imported_in_a_child_first(world, monkeypatch):
    model, checked = replace(CONFIG.model, quantization="both"), []
    monkeypatch.setattr(
        "fastdeploy_core.plugins.resolve.broken",
        lambda entries: checked.extend(entry.name for entry in entries) or {},
    )
    resolve(replace(CONFIG, model=model), inventory=world())
    assert {"both", "fp3", "fp5", "fp6"} <= set(checked)


def fails(names, error=PluginLoadError):
    """A stand-in for what a child process finds out."""
    return lambda entries: {e: error(f"{e.name} is broken") for e in entries if e.name in names}


@pytest.mark.parametrize("error", [PluginLoadError, ContractMismatch])
def test_a_winner_that_cannot_be_loaded_gives_way_to_the_next(world, monkeypatch, caplog, error):
    for module in ("resolve", "drivers"):
        monkeypatch.setattr(f"fastdeploy_core.plugins.{module}.broken", fails(["chip"], error))
    resolved = resolve(CONFIG, layers=[GQA], inventory=world())
    assert (resolved.name("device"), resolved.name("attention")) == ("cpu", "reference")
    words = "chip is broken; it is left out, the next candidate is used"
    assert words in resolved.notes and words in caplog.text
    row = next(r for r in resolved.decisions[0].candidates if r.name == "chip")
    assert not row.accepted and "chip is broken" in row.reason


def test_a_kernel_table_that_cannot_be_loaded_is_left_out(world, monkeypatch, caplog):
    """Here, so that no engine has to try it in a child process of its own."""

    def no_table(entries):
        return {e: PluginLoadError(f"{e.kind} {e.name} is broken") for e in entries
                if (e.kind, e.name) == ("kernels", "chip")}  # fmt: skip

    monkeypatch.setattr("fastdeploy_core.plugins.resolve.broken", no_table)
    resolved = resolve(CONFIG, layers=[GQA], inventory=world())
    assert resolved.name("device") == "chip"
    assert {e.name for e in resolved.plugin_entries("kernels")} == {"cpu"}
    words = "kernels chip is broken; it is left out"
    assert words in resolved.notes and words in caplog.text


def test_a_layer_driver_that_cannot_be_loaded_gives_way_too(world, monkeypatch):
    for module in ("resolve", "drivers"):
        monkeypatch.setattr(f"fastdeploy_core.plugins.{module}.broken", fails(["flash"]))
    resolved = resolve(CONFIG, layers=[GQA], inventory=world())
    assert (resolved.name("device"), resolved.name("attention")) == ("chip", "reference")


def test_a_driver_asked_for_by_name_must_load(world, monkeypatch):
    monkeypatch.setattr("fastdeploy_core.plugins.resolve.broken", fails(["chip"]))
    with pytest.raises(PluginLoadError, match="chip is broken"):
        resolve(with_device(device="chip"), inventory=world())


def test_the_default_scheduler_was_not_asked_for(world):
    decisions = resolve(CONFIG, inventory=world()).decisions
    assert next(d.why for d in decisions if d.kind == "scheduler") == "the default"


def test_speculative_requirements_reach_the_engine(world):
    config = replace(CONFIG, speculative=SpeculativeConfig("guess", 4))
    resolved = resolve(config, inventory=world())
    assert resolved.speculative.lookahead_tokens == 5 and resolved.speculative.key_lookahead == 1
    assert "guessing is on" in resolved.notes


def test_refusal_of_a_method_stops_start_up(world):
    config = replace(CONFIG, speculative=SpeculativeConfig("greedy", 4))
    with pytest.raises(ConfigError, match=r"fd-chip 1\.0.*two heads"):
        resolve(config, inventory=world())


def test_unknown_scheduler_and_architecture(world):
    config = replace(CONFIG, request_scheduler=RequestSchedulerConfig(name="redis"))
    with pytest.raises(PluginNotFound, match="no scheduler driver 'redis'"):
        resolve(config, inventory=world())
    model = replace(CONFIG.model, hf_config={"architectures": ["Unheard"]})
    with pytest.raises(UnsupportedModel, match="Known"):
        resolve(replace(CONFIG, model=model), inventory=world())


def with_grammar(backend):
    return replace(CONFIG, structured_outputs=StructuredOutputsConfig(backend=backend))


def test_the_only_grammar_backend_is_taken_unless_it_is_turned_off(world):
    taken = resolve(CONFIG, inventory=world())
    assert taken.grammar.name == "lark" and taken.name("grammar") == ""
    assert resolve(with_grammar("lark"), inventory=world()).name("grammar") == "lark"
    assert resolve(with_grammar("off"), inventory=world()).grammar is None
    with pytest.raises(PluginNotFound, match="no grammar driver 'peg'; installed: lark"):
        resolve(with_grammar("peg"), inventory=world())


def test_among_several_grammar_backends_the_operator_chooses(world):
    inventory = world(entry("grammar", "peg", "any_drivers:Any", "fd-peg"))
    with pytest.raises(ConfigError, match="lark, peg; say which with --guided-decoding-backend"):
        resolve(CONFIG, inventory=inventory)
    chosen = resolve(with_grammar("peg"), inventory=inventory)
    assert chosen.grammar.name == "peg" and chosen.names("grammar") == ["peg"]


def test_a_method_that_is_not_installed_names_the_command_that_installs_it(world):
    config = replace(CONFIG, speculative=SpeculativeConfig("ngram_match", 4))
    with pytest.raises(PluginNotFound, match="pip install fd-speculative"):
        resolve(config, inventory=world())


def test_resolution_survives_the_wire_and_loads_what_was_chosen(world):
    inventory = world()
    resolved = resolve(CONFIG, layers=[GQA], inventory=inventory)
    data = msgspec.msgpack.encode(resolved)
    there = msgspec.msgpack.decode(data, type=ResolvedPlugins)
    assert there == resolved and there.digest == resolved.digest
    there.verify(resolved.digest, inventory=inventory)
    assert there.load("device").__name__ == "Any"
    with pytest.raises(PluginNotFound, match="resolved at start-up"):
        there.load("attention", "reference")


def test_worker_with_other_plugins_is_refused(world):
    inventory = world()
    resolved = resolve(CONFIG, inventory=inventory)
    with pytest.raises(PluginConflict, match="digest"):
        resolved.verify("0" * 64, inventory=inventory)
    with pytest.raises(PluginConflict, match=r"fd-chip 1\.0"):
        resolved.verify(inventory=world(chip=False))


def test_digest_says_whether_anything_differs(world):
    first = resolve(CONFIG, inventory=world()).digest
    assert resolve(CONFIG, inventory=world()).digest == first
    assert resolve(with_device(device="cpu"), inventory=world()).digest != first


def test_broken_hook_module_does_not_travel(world, tmp_path):
    (tmp_path / "broken_hooks.py").write_text("raise RuntimeError('no')")
    resolved = resolve(CONFIG, inventory=world(entry("hooks", "b", "broken_hooks", "fd-broken")))
    hooks = resolved.plugin_entries("hooks")
    assert {e.distribution for e in hooks} == {"fastdeploy-core", "fd-chip"}
    assert any("fd-broken" in n for n in resolved.notes)


def test_configure_fires_once_with_the_configuration(world, tmp_path):
    (tmp_path / "listener.py").write_text(
        "from fastdeploy_core.contracts import hookimpl\nheard = []\n"
        "@hookimpl\ndef fd_configure(config):\n    heard.append(config)\n"
    )
    resolve(CONFIG, inventory=world(entry("hooks", "l", "listener", "fd-listener")))
    import listener

    assert listener.heard == [CONFIG]


def names(decision):
    return [c.name for c in decision.candidates]


def test_decision_by_score_then_name():
    candidates = [
        (Candidate("b", Accept(5)), "d"),
        (Candidate("a", Accept(5)), "d"),
        (Candidate("z", Accept(7, "fast")), "d"),
        (Candidate("no", Decline("because")), "d"),
    ]
    decision = decide("moe", "?", candidates)
    assert decision.winner == "z" and names(decision) == ["z", "a", "b", "no"]
    assert decide("moe", "?", candidates[:2]).winner == "a"
    assert decide("moe", "?", candidates[3:]).winner == ""
    assert decide("moe", "?", candidates, asked="b").winner == "b"
    assert decide("moe", "?", candidates, asked="no").winner == ""


@pytest.mark.parametrize(("device", "winner"), [("cuda", "cuda_paged"), ("gcu", "reference")])
@pytest.mark.parametrize("needs", [{"window": 8}, {"chunk": 8}, {"sinks": True}, {"softcap": 30.0}])
def test_installed_drivers_without_a_kind_of_layer_leave_it_to_others(device, winner, needs):
    """Of every distribution that is installed, asked as for its own device."""
    inventory = discover()
    (question,) = attention_questions(
        [replace(GQA, **needs)],
        device=device,
        tensor_library="torch",
        block_size=64,
        quantization=QuantizationSettings(),
        max_model_len=1024,
    )
    hooks = hook_manager(inventory=inventory)
    ask = (hooks, inventory, "attention", "fd_attention_backends", [question])
    decision = ask_layer_drivers(*ask)
    rows = {row.name: row.reason for row in decision.candidates if not row.accepted}
    assert decision.winner == winner
    (word,) = needs
    assert f"does not declare {word}" in rows["gcu_flash"]
    if winner == "reference":
        assert "runs on cuda" in rows["cuda_paged"]


def test_a_window_that_no_sequence_exceeds_is_no_window():
    asked = {"device": "cpu", "tensor_library": "torch", "block_size": 64}
    asked |= {"quantization": QuantizationSettings()}
    layers = [WINDOW, GQA, replace(GQA, chunk=8)]
    (question,) = attention_questions(layers, **asked, max_model_len=8)
    assert question.spec == GQA
    assert len(attention_questions(layers, **asked, max_model_len=9)) == 3
