"""/metrics, /load, /version, /plugins: names, kinds and bounded labels."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_core import __version__
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, live, wait_for

COUNTERS = [
    "requests_number",
    "request_success",
    "request_preempted",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_token_num",
    "prefix_gpu_cache_token_num",
    "prefix_cpu_cache_token_num",
    "requests_rejected",
    "requests_aborted",
    "http_requests",
]
GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_enqueued",
    "batch_size",
    "max_batch_size",
    "available_batch_size",
    "hit_token_rate",
    "available_gpu_block_num",
    "free_gpu_block_num",
    "max_gpu_block_num",
    "available_gpu_resource",
    "gpu_cache_usage_perc",
    "engine_last_progress_seconds",
    "engine_ready",
    "loop_lag_seconds",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_inference_time_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
]


def scrape(client: httpx.Client) -> dict[str, object]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families: dict, name: str, sample: str = "") -> float:
    family = families[f"fastdeploy:{name}"]
    wanted = family.name + sample
    return sum(s.value for s in family.samples if s.name == wanted)


def test_names_and_kinds_are_the_originals(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "x"})
    families = scrape(client)
    for names, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert families[f"fastdeploy:{name}"].type == kind, name


# Series that vLLM's dashboards, and the autoscalers of its charts, ask for.
VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket"),
    *("inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_params_max_tokens_bucket"),
)


def test_prometheus_can_give_our_series_vllms_names(client: httpx.Client) -> None:
    """By deploy/monitoring/vllm-names.yaml, applied here as Prometheus does."""
    file = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "vllm-names.yaml"
    rules = yaml.safe_load(file.read_text("utf-8"))["metric_relabel_configs"]
    client.post("/v1/completions", json={"prompt": "x"})
    named = set()
    for sample in (s for family in scrape(client).values() for s in family.samples):
        name = sample.name
        for rule in rules:
            if match := re.fullmatch(rule["regex"], name):
                name = match.expand(rule["replacement"].replace("$", "\\"))
        named.add(name)
        assert "model_name" in sample.labels or "http_" in name or "loop_lag" in name, name
    assert not {f"vllm:{name}" for name in VLLM} - named


def test_a_request_is_counted_and_timed(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 30})
    body = {"prompt": "abc", "stream": True, "max_tokens": 5}
    assert client.post("/v1/completions", json=body).status_code == 200
    families = scrape(client)
    assert value(families, "requests_number", "_total") == 2
    assert value(families, "time_to_first_token_seconds", "_count") == 2
    assert value(families, "e2e_request_latency_seconds", "_count") == 2
    assert value(families, "request_prompt_tokens", "_sum") == 6
    generated = 2 * (len("Hello, world!") + 1) + 5
    assert value(families, "request_generation_tokens", "_sum") == generated
    by_reason = {
        s.labels["finished_reason"]: s.value
        for s in families["fastdeploy:request_success"].samples
        if s.name.endswith("_total")
    }
    assert by_reason == {"stop": 2.0, "length": 1.0, "abort": 0.0, "error": 0.0}


def test_what_clients_send_makes_no_new_series(client: httpx.Client) -> None:
    def series() -> set[str]:
        samples = [s for family in scrape(client).values() for s in family.samples]
        return {f"{s.name}{sorted(s.labels.items())}" for s in samples}

    for number in range(3):
        client.get(f"/nope/{number}")
        client.get(f"/v1/models/none-{number}")
        client.get("/metrics")
        client.post("/v1/completions", json={"prompt": "x", "model": f"m{number}"})
    before = series()
    for number in range(40):
        client.get(f"/other/{number}")
        client.get(f"/v1/models/other-{number}")
        client.post("/v1/completions", json={"prompt": "x", "model": f"n{number}", "user": "u"})
    assert series() == before
    assert "other-1" not in client.get("/metrics").text


def test_two_apps_share_no_counter(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    with live(engine, tokenizer) as one, live(engine, tokenizer) as two:
        httpx.post(one.url + "/v1/completions", json={"prompt": "x"})
        with httpx.Client(base_url=two.url) as client:
            assert value(scrape(client), "requests_number", "_total") == 0


def test_version_load_and_models(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/load").json() == {"server_load": 0}
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["owned_by"] == "FastDeploy"
    assert card["max_model_len"] == 512
    assert client.get("/v1/models/tiny").json() == card


def test_plugins_lists_the_cores_own_drivers(client: httpx.Client) -> None:
    rows = client.get("/plugins").json()["plugins"]
    assert {"kind": "device", "name": "null"}.items() <= next(
        row for row in rows if row["name"] == "null"
    ).items()


def test_the_description_of_the_api_is_whole(client: httpx.Client) -> None:
    """Every reference leads somewhere, and every body is described."""
    text = client.get("/openapi.json").text
    described = json.loads(text)
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in described["components"]["schemas"], name
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert described["paths"][path]["post"]["requestBody"]["required"]
    chat = described["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "tools", "response_format"} <= chat.keys()


def test_log_lines_have_sizes_and_never_text(
    engine: ScriptedEngine, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = {"log_requests": True, "log_stats": True, "stats_interval_s": 0.05}
    with live(engine, tokenizer, **options) as server:
        body = {"prompt": "very secret words", "max_tokens": 3}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        wait_for(lambda: "tokens/s" in caplog.text, "the scheduler line")
    assert re.search(r"17 prompt tokens, 3 generated, length, first after", caplog.text)
    assert re.search(r"prompt \d+\.\d tokens/s, generation \d+\.\d tokens/s, running", caplog.text)
    assert "secret" not in caplog.text
