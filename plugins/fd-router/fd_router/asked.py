"""What a client asks for, as far as routing needs to know."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .cached.prefix_index import chained_keys
from .policies import RequestView

BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4  # of text, estimated; token ids are written in as many
MAX_BLOCKS = 2048  # of a prompt have keys


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read once."""

    path: str  # with its query
    body: bytes  # what instances get
    fields: dict[str, Any]  # empty where the body is no JSON object, which instances refuse
    view: RequestView
    token_ids: bytes = b""  # of a prompt given as ids, four bytes each

    @property
    def streams(self) -> bool:
        """Whether events are asked for."""
        return self.fields.get("stream") is True

    def scopes(self, key: str) -> tuple[str, ...]:
        """The salts that an instance may give the first block, as it asks for keys or does not.
        key: what it gets in Authorization."""
        salt = str(self.fields.get("cache_salt") or "")
        scheme, _, secret = key.partition(" ")
        if scheme.lower() != "bearer":
            return (salt,)
        return (salt, f"{hashlib.sha256(secret.strip().encode()).hexdigest()[:16]}@{salt}")

    def to_tokenize(self) -> bytes:
        """The body by which /tokenize tells this prompt's tokens; empty where it cannot."""
        if self.token_ids or not (self.view.prefix_keys or self.fields.get("messages")):
            return b""
        names = ["model", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"]
        names += ["add_special_tokens", "messages", "tools"]
        if isinstance(self.fields.get("prompt"), str):
            names = ["model", "add_special_tokens", "prompt"]
        kept = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        return json.dumps(kept).encode()


def read_request(path: str, headers: Mapping[str, str], body: bytes) -> Asked:
    """Reads a request. ValueError for JSON that nests too deeply."""
    fields = _fields(body)
    session = headers.get("X-Session-Id", "")
    for name in ("session_id", "prompt_cache_key", "user", "safety_identifier"):
        session = session or str(fields.get(name) or "")
    prompt = _prompt(fields)
    # Instances share cached prefixes within a key, a model and a salt.
    scope = f"{headers.get('Authorization')}\0{fields.get('model')}\0{fields.get('cache_salt')}"
    salt = blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    keys = chained_keys(prompt, BLOCK_TOKENS * BYTES_PER_TOKEN, salt, MAX_BLOCKS)
    tokens = len(prompt) // BYTES_PER_TOKEN + bool(prompt)
    view = RequestView(tokens, keys, BLOCK_TOKENS, session[:256])
    given = fields.get("prompt_token_ids") or fields.get("prompt")
    return Asked(path, body, fields, view, as_ids(given))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if body else {}
    except RecursionError:
        raise ValueError("the body nests too deeply") from None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _prompt(fields: Mapping[str, Any]) -> bytes:
    """The prompt, so that equal beginnings of prompts are equal bytes."""
    if ids := as_ids(fields.get("prompt_token_ids")):
        return ids
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list):
        return as_ids(prompt) or _as_text(prompt)
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return b""
    tools = fields.get("tools")
    return (_as_text(tools) if tools else b"") + b"\0".join(map(_as_text, messages))


def as_ids(value: Any) -> bytes:
    try:
        return array("I", value).tobytes() if isinstance(value, list) else b""
    except (TypeError, OverflowError):
        return b""


def _as_text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
