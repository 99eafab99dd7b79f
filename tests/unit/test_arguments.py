"""The argument table: every row parses under every spelling, and nothing unknown slips through."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.cli.parsing import parse_table
from fastdeploy_core.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    WatchdogConfig,
    other_flags,
)
from fastdeploy_core.config.argument_table import PART_SPELLINGS, Argument
from fastdeploy_core.config.argument_values import (
    ARGUMENTS,
    BY_SPELLING,
    NEGATIVE,
    ROWS,
    coerce,
    part_value,
    spelling,
    with_defaults,
)
from fastdeploy_core.config.arguments import (
    build_engine_config,
    build_server_config,
    normalise,
    of_scope,
)
from fastdeploy_core.config.other_flags import OTHER_FLAGS, SHORT
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.input import default_sampling_values
from fastdeploy_core.errors import ConfigError

SCOPES = ("engine", "server")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 1024,
        "vocab_size": 100,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 0.9}))
    return tmp_path


def parse(*argv: str) -> dict[str, Any]:
    return parse_table(argv, "fastdeploy serve", "test", SCOPES)[0]


def sample(row: Argument) -> tuple[list[str], Any]:
    """A value other than the default, as words of a command line and as it arrives."""
    if row.type == "str":
        value = row.choices[-1] if row.choices else "some-name"
        return [value], value
    if row.type == "int":
        value = int((row.low or 0) + (2 if row.default == (row.low or 0) + 1 else 1))
        return [str(value)], value
    if row.type == "float":
        value = 0.5 if row.high == 1.0 else (row.low or 0) + 1.5
        return [str(value)], value
    if row.type == "json":
        return ['{"a": [1, null]}'], {"a": [1, None]}
    if row.type == "ints":
        return ["4"], [4]
    return ["x"], ["x"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_argument_parses_under_every_spelling(row: Argument) -> None:
    flags = [*row.short, *("--" + s.replace("_", "-") for s in row.spellings)]
    flags += ["--" + row.name]  # underscores work as well
    for flag in flags:
        if row.type == "bool":
            assert parse(flag) == {row.name: True}
            if flag.startswith("--"):
                assert parse("--no-" + flag[2:].replace("_", "-")) == {row.name: False}
            continue
        words, value = sample(row)
        assert parse(flag, *words) == {row.name: value}
        if flag.startswith("--"):
            assert parse(f"{flag}={words[0]}") == {row.name: value}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_default_is_the_tables_and_valid(row: Argument) -> None:
    assert with_defaults({})[row.name] == row.default
    assert normalise({row.name: None}) == {row.name: row.default}
    if row.default is not None:
        assert coerce(row, row.default) == row.default
    assert row.help
    assert not row.help.endswith(".")


def test_a_bound_is_written_out() -> None:
    with pytest.raises(ConfigError, match="between 16 and 16777216, got 100000000"):
        coerce(ARGUMENTS["max_model_len"], 10**8)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.type in ("int", "float")], ids=lambda row: row.name
)
def test_every_number_is_bounded(row: Argument) -> None:
    assert row.low is not None
    assert row.high is not None
    for wrong in (row.low - 1, row.high * 2 + 2):
        if str(wrong) in row.translate:
            continue
        with pytest.raises(ConfigError, match=r"must be between|must be an integer"):
            coerce(row, int(wrong) if row.type == "int" else wrong)
    for wrong in (True, "many", [], float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=row.flag):
            coerce(row, wrong)


def test_no_two_rows_share_a_spelling() -> None:
    spellings = [s for row in ROWS for s in (*row.spellings, *row.negative, *row.short)]
    assert len(spellings) == len(set(spellings))
    known = {*BY_SPELLING, *NEGATIVE}
    assert not known & OTHER_FLAGS.keys()
    file = Path(other_flags.__file__).with_suffix(".json")
    groups = json.loads(file.read_text("utf-8"))["groups"]
    assert len(OTHER_FLAGS) == sum(len(group["names"]) for group in groups)  # none in two groups
    assert not SHORT.keys() & {s for row in ROWS for s in row.short}
    assert set(SHORT.values()) <= OTHER_FLAGS.keys()


def named(what: str) -> list[str]:
    return [name for name, flag in OTHER_FLAGS.items() if flag.do == what]


def words_for(name: str) -> list[str]:
    words = {"none": [], "one": ["surely-not-harmless"], "many": ["a", "b"]}[
        OTHER_FLAGS[name].value
    ]
    return ["--" + name.replace("_", "-"), *words]


@pytest.mark.parametrize("name", named("refuse"))
def test_every_refused_argument_says_why(name: str) -> None:
    row, words = OTHER_FLAGS[name], words_for(name)
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    assert words[0] in str(caught.value)
    assert row.reason in str(caught.value)
    with pytest.raises(ConfigError):
        normalise({name: "surely-not-harmless" if row.value != "none" else True})
    for value in row.harmless:
        assert parse(words[0], value) == {}
        assert normalise({name: value}) == {}
    if row.value == "none":
        assert parse("--no-" + name.replace("_", "-")) == {}


@pytest.mark.parametrize("name", named("take"))
def test_an_argument_without_effect_is_taken_with_one_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, words = OTHER_FLAGS[name], words_for(name)
    assert parse(*words, "--max-num-seqs", "3") == {"max_num_seqs": 3}
    assert [r.getMessage() for r in caplog.records] == [f"{words[0]} has no effect: {row.reason}"]
    caplog.clear()
    assert normalise({name: True if row.value == "none" else "x"}) == {}
    assert len(caplog.records) == 1
    caplog.clear()
    assert normalise({name: None}) == {}
    assert not caplog.records


@pytest.mark.parametrize("name", named("always"))
def test_what_always_happens_may_be_asked_for_and_not_forbidden(name: str) -> None:
    flag = name.replace("_", "-")
    assert parse(f"--{flag}") == {}
    with pytest.raises(ConfigError, match="cannot be turned off"):
        parse(f"--no-{flag}")


def test_no_flag_of_the_two_projects_is_unknown() -> None:
    known = {*BY_SPELLING, *NEGATIVE, *PART_SPELLINGS, *OTHER_FLAGS, "config"}
    short = {*SHORT, *(s for row in ROWS for s in row.short)}
    lines = Path(__file__).with_name("known_flags.txt").read_text("utf-8").split()
    flags = [word for word in lines if word.startswith("-")]
    unknown = [f for f in flags if spelling(f) not in known and f not in short]
    assert len(flags) > 440
    assert unknown == []


def test_the_printed_flags_of_the_original_start_a_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = (
        "--port 8180 --metrics-port 8181 --engine-worker-queue-port 8182 --cache-queue-port 8183 "
        "--max-model-len 32768 --max-num-seqs 32 --kv-cache-ratio 0.75 --trust-remote-code "
        "-pp 1 -tp 1"
    )
    values = parse(*words.split(), "m")
    expected = {"port": 8180, "max_model_len": 32768, "max_num_seqs": 32, "model": "m"}
    assert values == {**expected, "tensor_parallel_size": 1}
    said = [r.getMessage().split()[0] for r in caplog.records]
    assert said == [
        *("--metrics-port", "--engine-worker-queue-port", "--cache-queue-port"),
        *("--kv-cache-ratio", "--trust-remote-code"),
    ]


def test_short_flags_of_speculative_decoding() -> None:
    section = {"method": "ngram_match", "num_speculative_tokens": 3}
    assert parse("--spec-method", "ngram_match", "--spec-tokens", "3") == {
        "speculative_config": section
    }
    assert normalise({"spec_method": "ngram_match", "spec_tokens": 3}) == {
        "speculative_config": section
    }


def test_the_documented_early_stop_starts_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """FastDeploy 2.x's page prints both; they kept servers from starting."""
    more = ("--early-stop-config", '{"enable_early_stop":true, "window_size": 1000}')
    assert parse("--enable-early-stop", *more) == {}
    assert caplog.text.count("as long as max_tokens allows") == 2


def test_a_secret_that_is_not_taken_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("--hf-token", "hf_secret") == {}
    assert "HF_TOKEN" in caplog.text and "hf_secret" not in caplog.text


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--max-num-sqes", "--max-num-seqs"),
        ("--tensor-parallel", "--tensor-parallel-size"),
        ("--max_model_length", "--max-model-len"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--served-model-names", "--served-model-name"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
    ],
)
def test_unknown_arguments_are_refused_with_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown argument '{given.replace('_', '.')}'.*{nearest}"
    ):
        parse(given, "1")
    keyword = given.removeprefix("--").replace("-", "_")
    with pytest.raises(ConfigError, match=nearest.removeprefix("--").replace("-", "_")):
        normalise({keyword: 1})


def test_an_unknown_argument_that_is_like_nothing_points_to_help() -> None:
    with pytest.raises(ConfigError, match="fastdeploy serve --help"):
        parse("--xyzzy-plugh")


def test_another_commands_hints_are_its_own() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--num-iterations")

    for given, hint in {
        "--num-iteration": "--num-iterations",
        "--prt": "see `bench --help`",
    }.items():
        with pytest.raises(ConfigError, match=hint) as told:
            parse_table([given, "1"], "bench", "test", ("engine",), own)
        assert "--port" not in str(told.value)  # an argument of servers


def test_help_of_a_word_is_that_of_a_group_or_of_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def help_of(word: str) -> str:
        with pytest.raises(SystemExit) as left:
            parse(f"--help={word}")
        assert not left.value.code
        return capsys.readouterr().out

    group = help_of("CacheConfig")
    assert "--block-size" in group and "--max-num-seqs" not in group
    for word in ("max-num-seqs", "max_num_seqs"):
        assert "--max-num-seqs" in help_of(word) and "--block-size" not in help_of(word)
    assert {"--block-size", "--max-num-seqs"} <= set(help_of("all").replace(",", " ").split())


def test_abbreviations_are_not_taken() -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse("--max-model", "5")


def test_the_model_is_positional_or_named_but_not_two() -> None:
    assert parse("m") == parse("--model", "m") == parse("m", "--model", "m") == {"model": "m"}
    with pytest.raises(ConfigError, match="two models"):
        parse("m", "--model", "n")
    with pytest.raises(ConfigError, match="unexpected argument 'n'"):
        parse("m", "n")


def test_sizes_may_be_written_short() -> None:
    assert parse("--max-model-len", "32k") == {"max_model_len": 32_000}
    assert parse("--max-model-len", "32K") == {"max_model_len": 32_768}
    assert parse("--max-model-len", "auto") == {"max_model_len": None}


def test_values_of_other_projects_are_translated() -> None:
    assert parse("--load-choices", "default_v1") == {"load_format": "auto"}
    assert parse("--dtype", "half") == {"dtype": "float16"}
    assert parse("--guided-decoding-backend", "guidance") == {
        "guided_decoding_backend": "llguidance"
    }
    assert parse("--disable-log-stats") == {"log_stats": False}
    assert parse("--moe-backend", "auto") == {"moe_backend": ""}
    assert parse("--log-level", "WARNING") == {"log_level": "warning"}


def test_json_options_have_a_dotted_form() -> None:
    assert parse(
        *("--speculative-config", '{"method": "a", "deep": {"x": 1}}'),
        *("--speculative-config.method", "mtp", "--speculative-config.deep.y=true"),
        *("--speculative_config.num-speculative-tokens", "2"),
    ) == {
        "speculative_config": {
            "method": "mtp",
            "deep": {"x": 1, "y": True},
            "num_speculative_tokens": 2,
        }
    }
    with pytest.raises(ConfigError, match="not a JSON option"):
        parse("--block-size.x", "1")


@pytest.mark.parametrize("name", PART_SPELLINGS)
def test_a_spelled_out_option_of_a_scheduler_is_a_part_of_its_section(name: str) -> None:
    section, part = PART_SPELLINGS[name]
    flag = "--" + name.replace("_", "-")
    for text in ("1e5", "7"):
        value = part_value(section, text)
        assert value == (7 if (section, text) == ("speculative_config", "7") else text)
        assert parse(flag, text) == parse(f"--{name}={text}") == {section: {part: value}}
        assert normalise({name: text}) == {section: {part: value}}
    assert normalise({name: None}) == {}
    assert name not in {*BY_SPELLING, *OTHER_FLAGS}
    with pytest.raises(ConfigError, match="needs a value"):
        parse(flag, "--model", "m")


def test_spelled_out_options_join_what_the_section_holds(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("scheduler_host: a\nscheduler-port: 1\nscheduler_config: {topic: t}\n")
    values = parse("--config", str(file), "--scheduler-host", "b", "--scheduler-config.db", "2")
    assert values["scheduler_config"] == {"host": "b", "port": 1, "topic": "t", "db": 2}
    both = {"scheduler_config": '{"host": "a"}', "scheduler_host": "b"}
    with pytest.raises(
        ConfigError, match=r"scheduler_host and scheduler_config\.host .* different"
    ):
        normalise(both)
    with pytest.raises(ConfigError, match="must be a JSON object"):
        normalise({"scheduler_config": "[1]", "scheduler_host": "b"})
    with pytest.raises(ConfigError, match="--scheduler-topic"):
        parse("--scheduler-topics", "x")
    with pytest.raises(ConfigError, match="needs a value"):
        parse("--speculative-config.method")
    with pytest.raises(ConfigError, match="cannot have parts"):
        parse("--speculative-config.a=1", "--speculative-config.a.b=1")


def test_a_yaml_file_lies_below_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "fd.yaml"
    file.write_text(
        "model: from-file\nmax-num-seqs: 4\nmax_model_len: 64\nenable-prefix-caching: false\n"
        "api-key: [a, b]\nspeculative-config: {method: mtp, k: 1}\nno-async-scheduling: true\n"
    )
    values = parse(
        *("--config", str(file), "--max-num-seqs", "8", "--speculative-config.method", "ngram")
    )
    assert values == {
        "model": "from-file",
        "max_num_seqs": 8,
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "api_key": ["a", "b"],
        "speculative_config": {"method": "ngram", "k": 1},
        "async_scheduling": False,  # as vLLM's files spell it
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-sequences: 4", "did you mean max_num_seqs"),
        ("- 4", "must map argument names"),
        ("port: 1\nport: 2", "gives a name twice"),
        ("a: [", "not valid YAML"),
        ("max-num-seqs: many", "--max-num-seqs must be an integer"),
        ("data_parallel_rank: 1", "one command starts all engines"),
        ("port: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_wrong_yaml_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "fd.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        parse("--config", str(file))
    assert "fd.yaml" in str(caught.value)


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
@pytest.mark.parametrize("value", ["", " "])
def test_no_key_and_no_name_is_empty(flag: str, value: str) -> None:
    """As of an unset variable, which would leave the server open."""
    with pytest.raises(ConfigError, match=f"{flag} must be a list of strings that are not empty"):
        parse(flag, value)


def test_a_secret_is_not_repeated_in_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        normalise({"api_key": 12345})
    assert "12345" not in str(caught.value)


def test_defaults_of_the_table_are_those_of_the_records(model: Path) -> None:
    config = build_engine_config({"model": str(model)})
    assert config.cache == CacheConfig()
    assert config.watchdog == WatchdogConfig()
    plain = EngineConfig(model=config.model)
    for name in (f.name for f in fields(EngineConfig)):
        if name not in ("model", "batch"):
            assert getattr(config, name) == getattr(plain, name), name
    assert config.batch.max_num_seqs == BatchConfig().max_num_seqs
    assert config.batch.long_prefill_token_threshold == 0, "the batch scheduler knows the rule"
    server = build_server_config({}, config, {})
    plain_server = ServerConfig()
    derived = {"served_names", "default_sampling"}
    for name in (f.name for f in fields(ServerConfig)):
        if name not in derived:
            assert getattr(server, name) == getattr(plain_server, name), name


def test_every_argument_changes_a_configuration(model: Path) -> None:
    """No row is decoration: another value makes another configuration."""
    small = {"max_num_batched_tokens": 1500, "max_num_partial_prefills": 4}
    special: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(model.parent),
        "chat_template": "{{ x }}",
        "generation_config": "none",
        "override_generation_config": {"top_k": 3},
        "hf_overrides": {"vocab_size": 7},
        "speculative_config": {"method": "mtp"},
        "structured_outputs_config": {"max_depth": 3},
        "default_chat_template_kwargs": {"enable_thinking": False},
        "scheduler_config": {"host": "h"},
        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "ipc://x"},
        "limit_mm_per_prompt": {"image": 2},
        "allowed_local_media_path": str(model),
        "graph_capture_sizes": ["1", "4"],
        "cuda_graph_sizes": ["2", "4"],
        "graph_optimization_config": {"use_cudagraph": False},
        "compilation_config": {"cudagraph_capture_sizes": [8]},
        "allowed_origins": ["https://a"],
        "ssl_keyfile": str(model / "config.json"),
        "ssl_certfile": str(model / "config.json"),
        "max_num_batched_tokens": 1700,
        "max_model_len": 512,
        "max_num_partial_prefills": 5,
        "kv_cache_dtype": "int8",
        "device": "x",
        "enable_expert_parallel": True,
        "eplb_config": {"step_interval": 9},
        "enable_lora": True,
        "lora_modules": ["name=folder"],
    }
    together = {
        "ssl_keyfile": "ssl_certfile",
        "ssl_certfile": "ssl_keyfile",
        "expert_communicator": "enable_expert_parallel",
        **dict.fromkeys(("enable_eplb", "eplb_config"), "enable_expert_parallel"),
        **dict.fromkeys(("lora_root", "max_loras", "max_lora_rank"), "enable_lora"),
        **dict.fromkeys(("max_cpu_loras", "lora_target_modules", "lora_experts"), "enable_lora"),
    }

    def build(values: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
        values = normalise({"model": str(model), **small, **values})
        engine = build_engine_config(of_scope(values, "engine"))
        return engine, build_server_config(values, engine, {})

    plain = build({})
    for row in ROWS:
        # The level belongs to the process, not the server; the next two say where a model that is
        # named comes from, and this one is a folder; the others are fd-pooling's to read.
        if row.name in ("model", "log_level", "revision", "download_dir"):
            continue
        if row.name in ("runner", "convert", "pooler_config"):
            continue
        value = special.get(row.name, not row.default if row.type == "bool" else sample(row)[1])
        if row.name in together:
            other = together[row.name]
            changed = build({row.name: value, other: special.get(other, value)})
            if other == "enable_lora":
                assert changed != build({"enable_lora": True}), row.name
        else:
            changed = build({row.name: value})
        assert changed != plain, row.name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "at least --max-num-seqs"),
        ({"max_num_batched_tokens": 40, "block_size": 64, "max_num_seqs": 4}, "--block-size"),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, "without chunked"),
        ({"max_long_partial_prefills": 2}, "--max-long-partial-prefills 2"),
        ({"long_prefill_token_threshold": 5000}, "--long-prefill-token-threshold"),
        ({"structured_outputs_config": {"max_dept": 3}}, "did you mean 'max_depth'"),
        ({"structured_outputs_config": {"max_depth": "3"}}, "must be of type int"),
        ({"speculative_config": {"k": 2}}, "needs a method"),
        ({"speculative_config": {"method": "x", "num_speculative_tokens": 0}}, "between 1 and 32"),
        ({"speculative_config": [1]}, "must be a JSON object"),
        ({"tokenizer": "/nowhere"}, "--tokenizer '/nowhere'"),
        ({"chat_template": "/nowhere"}, "neither a template nor a readable file"),
        ({"model": None}, "no model given"),
        ({"expert_communicator": "auto"}, "needs --enable-expert-parallel"),
        ({"enable_eplb": True}, "needs --enable-expert-parallel"),
        ({"port": 80}, "argument of the server"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    model: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_engine_config({"model": str(model), **values})
    assert words in str(caught.value)


def test_defaults_adapt_to_small_and_large_limits(model: Path) -> None:
    def tokens(**values: Any) -> int:
        batch = build_engine_config({"model": str(model), **values}).batch
        return batch.max_num_batched_tokens

    assert tokens() == 2048
    assert tokens(max_num_seqs=1, max_model_len=16, block_size=4) == 16
    assert tokens(max_num_seqs=4096) == 4096
    # More than two sequences ever have in a step: taken, as vLLM takes it.
    assert tokens(max_num_batched_tokens=9000, max_num_seqs=2, max_model_len=1024) == 2048
    assert tokens(enable_chunked_prefill=False) == 2048
    assert (
        tokens(enable_chunked_prefill=False, hf_overrides={"max_position_embeddings": 9000}) == 9000
    )


def test_both_projects_spellings_reach_the_engine(model: Path) -> None:
    config = build_engine_config(
        {
            "model": model,
            "tp_size": 2,
            "max_num_queued_reqs": 7,
            "num_gpu_blocks_override": 9,
            "gpu_memory_utilization": 0.5,
            "swap_space": 0.5,
            "enable_overlap_schedule": False,
        }
    )
    assert config.parallel.tensor_parallel_size == 2
    assert config.request_scheduler.max_size == 7
    assert config.cache.num_blocks_override == 9
    assert config.cache.memory_utilization == 0.5
    assert config.cache.swap_space_bytes == 2**29
    assert config.batch.overlap is False
    with pytest.raises(ConfigError, match="given twice"):
        build_engine_config({"model": model, "tp_size": 2, "tensor_parallel_size": 4})


def test_api_keys_come_from_flags_and_the_environment(model: Path) -> None:
    engine = build_engine_config({"model": model})
    values = normalise({"api_key": ["a"]})
    variables = {"FD_API_KEY": "b, c,,a", "VLLM_API_KEY": "d,e"}
    server = build_server_config(values, engine, variables)
    assert server.api_keys == ("a", "b", "c", "d,e")
    for wrong in ("sha256:", "sha256:abc", "sha256:" + "G" * 64, "sha256:" + "a" * 65):
        with pytest.raises(ConfigError, match="64 digits"):
            build_server_config(normalise({"api_key": [wrong]}), engine, {})
    assert "'b'" not in repr(server)


def test_without_a_key_only_this_machine_is_served(model: Path) -> None:
    engine = build_engine_config({"model": model})
    for values, variables, host in (
        ({}, {}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, {}, "0.0.0.0"),
        ({"api_key": ["a"]}, {}, "0.0.0.0"),
        ({}, {"VLLM_API_KEY": "a"}, "0.0.0.0"),
        ({"host": "::1", "api_key": ["a"]}, {}, "::1"),
    ):
        assert build_server_config(normalise(values), engine, variables).host == host


def test_served_names_are_verified_only_when_given(model: Path) -> None:
    engine = build_engine_config({"model": model})
    assert build_server_config({}, engine, {}).served_names == (model.name,)
    assert not build_server_config({}, engine, {}).verify_model_name
    values = normalise({"served_model_name": ["x", "y"]})
    engine = build_engine_config({"model": model, **values})
    server = build_server_config(values, engine, {})
    assert server.served_names == ("x", "y")
    assert server.verify_model_name


def test_generation_defaults_are_the_models_and_can_be_changed(model: Path) -> None:
    def defaults(**values: Any) -> dict[str, Any]:
        return dict(build_engine_config({"model": model, **values}).model.generation_config)

    assert defaults() == {"temperature": 0.5, "top_p": 0.9}
    assert defaults(generation_config="none") == {}
    changed = defaults(override_generation_config='{"top_p": 0.1, "top_k": 2}')
    assert changed == {"temperature": 0.5, "top_p": 0.1, "top_k": 2}


def test_a_temperature_of_the_operator_makes_a_greedy_model_sample(model: Path) -> None:
    (model / "generation_config.json").write_text('{"do_sample": false}')

    def temperature(override: str) -> float | None:
        config = build_engine_config({"model": model, "override_generation_config": override})
        return default_sampling_values(config.model.generation_config).get("temperature")

    assert temperature('{"top_p": 0.5}') == 0.0
    assert temperature('{"temperature": 0.7}') == 0.7
    with pytest.raises(ConfigError, match="temperature"):
        temperature('{"temperature": 5}')


def test_every_row_has_a_place_in_help() -> None:
    from fastdeploy_core.cli.parsing import build_parser

    text = build_parser("fastdeploy serve", "test", SCOPES).format_help()
    for name in ARGUMENTS:
        assert "--" + name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-O3"], {}),
        (["-O", "2"], {}),
        (["-O=1"], {}),
        (["--attention-config.backend", "FLASH_ATTN"], {}),
        (["-ac.backend=FLASH_ATTN"], {}),
        (["-cc.cudagraph_mode=NONE"], {"compilation_config": {"cudagraph_mode": "NONE"}}),
        (
            ["-cc.mode", "3", "-tp=1"],
            {"compilation_config": {"mode": 3}, "tensor_parallel_size": 1},
        ),
        (["--nnodes", "1", "--node-rank", "0", "--master-addr", "10.0.0.1"], {}),
    ],
)
def test_short_and_dotted_spellings_of_vllm_are_read(
    argv: list[str], expected: dict[str, Any]
) -> None:
    assert parse(*argv) == expected
