"""Routes that plugins add: at paths of their own, beside the core's and never over them."""

from __future__ import annotations

from typing import Any

import fastapi
import httpx
import pytest

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.errors import PluginConflict
from fastdeploy_core.serving.plugin_routes import PluginRoutes
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, live

KEY = "sk-key"


def routes(path: str, method: str = "POST", **more: Any) -> ApiRoutes:
    router = fastapi.APIRouter()

    async def endpoint() -> dict[str, str]:
        return {"path": path}

    router.add_api_route(path, endpoint, methods=[method])
    return ApiRoutes(router, **more)


def shape(status: int, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    return {"oh": [status, message, param, request_id]}


def test_a_plugins_route_stands_at_its_own_path(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    added = [
        PluginRoutes("fd-a", "", routes("/v1/answers")),
        PluginRoutes("fd-b", "", routes("/b")),
    ]
    with live(engine, tokenizer, plugins=added) as server:
        assert httpx.post(f"{server.url}/v1/answers").json() == {"path": "/v1/answers"}
        assert httpx.post(f"{server.url}/b").json() == {"path": "/b"}


def test_it_stands_behind_the_keys_and_has_its_own_errors(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    added = [PluginRoutes("fd-a", "", routes("/v1/answers", error_body=shape))]
    options = {"api_keys": (KEY,), "max_body_bytes": 64}
    with live(engine, tokenizer, plugins=added, **options) as server:
        url, mine = f"{server.url}/v1/answers", {"x-request-id": "mine"}
        refused = httpx.post(url, headers=mine)
        assert refused.status_code == 401
        status, message, param, request_id = refused.json()["oh"]
        assert (status, param, request_id) == (401, None, "mine") and "X-Api-Key" in message
        large = httpx.post(url, headers={"x-api-key": KEY}, content=b"x" * 65)
        assert large.status_code == 413 and large.json()["oh"][0] == 413
        wrong = httpx.get(url, headers={"x-api-key": KEY})
        assert wrong.status_code == 405 and wrong.json()["oh"][0] == 405
        assert httpx.post(url, headers={"x-api-key": KEY}).status_code == 200
        assert "error" in httpx.post(f"{server.url}/v1/completions").json()


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": "wrong"}, {"x-api-key": ""}, {"x-api-key": f"Bearer {KEY}"}],
)
def test_a_wrong_key_in_the_other_header_opens_nothing(
    engine: ScriptedEngine, tokenizer: Tokenizer, headers: dict[str, str]
) -> None:
    with live(engine, tokenizer, api_keys=(KEY,)) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401


def test_either_header_may_hold_the_key(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    with live(engine, tokenizer, api_keys=(KEY,)) as server:
        for headers in (
            {"x-api-key": KEY},
            {"x-api-key": KEY, "authorization": "Bearer wrong"},
            {"x-api-key": "wrong", "authorization": f"Bearer {KEY}"},
        ):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models/{name}", "GET"),
        ("/v1/models/mine", "GET"),
        ("/health", "GET"),
        ("/plugins/fd-b/hello", "POST"),
        ("/v1/answers", "POST"),
    ],
)
def test_no_plugin_replaces_a_route(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, method: str
) -> None:
    added = [
        PluginRoutes("fd-b", "/plugins/fd-b", routes("/hello")),
        PluginRoutes("fd-b", "", routes("/v1/answers")),
        PluginRoutes("fd-a", "", routes(path, method)),
    ]
    owner = "fd-b" if path.startswith(("/plugins", "/v1/answers")) else "fastdeploy-core"
    with (
        pytest.raises(PluginConflict, match=rf"fd-a adds the route {method} .*{owner} serves"),
        live(engine, tokenizer, plugins=added),
    ):
        pass


def test_a_known_route_that_is_not_installed_says_what_to_install(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    with live(engine, tokenizer) as server:
        for path in ("/v1/messages", "/v1/messages/count_tokens?beta=true", "/v1/responses"):
            answer = httpx.post(f"{server.url}{path}", json={})
            assert answer.status_code == 404
            assert "pip install fd-agent-apis" in answer.json()["error"]["message"]
        other = httpx.post(f"{server.url}/v1/nothing", json={})
        assert "install" not in other.json()["error"]["message"]
