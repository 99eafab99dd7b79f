"""Reads a tokenizer folder: which files there are, what they set, and what is refused.

Only data files are read (JSON and template text), never code; `auto_map` entries are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from fastdeploy_core.config.model import read_json
from fastdeploy_core.errors import ConfigError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(slots=True)
class TokenizerFiles:
    """The content of a tokenizer folder's files."""

    path: Path
    config: dict[str, Any]
    named_tokens: dict[str, str] = field(default_factory=dict)
    extra_tokens: list[str] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
    # from generation_config.json or config.json
    eos_token_ids: list[int] = field(default_factory=list)


def read_files(path: str | Path) -> TokenizerFiles:
    """Read all small files; ConfigError says what is missing or malformed."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"tokenizer {str(path)!r} is not a folder on this machine")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(_no_tokenizer_json(folder))
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    files = TokenizerFiles(folder, config)
    for name in NAMED_TOKENS:
        text = _token_text(config.get(name, special_map.get(name)))
        if text is not None:
            files.named_tokens[name] = text
    files.extra_tokens = _extra_tokens(config) or _extra_tokens(special_map)
    files.chat_templates = _chat_templates(folder, config)
    source = folder / "generation_config.json"
    if (value := _read_json(source).get("eos_token_id")) is None:
        value = _read_json(source := folder / "config.json").get("eos_token_id")
    files.eos_token_ids = as_id_list(value, str(source))
    return files


def as_id_list(value: Any, where: str) -> list[int]:
    """eos_token_id as a list; it may be absent, one id or several."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(v, int) or isinstance(v, bool) for v in values):
        raise ConfigError(f"{where} has eos_token_id {value!r:.60}; expected a number or a list")
    return values


def load_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """The tokenizer of tokenizer.json with the changes that tokenizer_config.json asks for.

    The rules are those of transformers 5: tokens named in the configuration become special tokens.
    Only tokenizer.json's post-processor decides which of them encode() adds (add_bos_token and
    add_eos_token of the configuration apply to files without a post-processor).
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(files.path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"cannot read {files.path / 'tokenizer.json'}: {str(error)[:300]}; it must be a file "
            f"of the tokenizers library (installed: {tokenizers.__version__})"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    if files.config.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
    _add_tokens(backend, files)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = files.config.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, Mapping) else []
    for key, _ in entries:
        if not key.isdecimal():
            raise ConfigError(
                f"{files.path / 'tokenizer_config.json'}: added_tokens_decoder has the key "
                f"{key[:40]!r}, which is no token id; correct the file or remove the entry"
            )
    for _, entry in sorted(entries, key=lambda item: int(item[0])):
        token = _added_token(entry)
        if token is not None and token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
    special = [*files.named_tokens.values(), *files.extra_tokens]
    # Also for existing tokens: this marks them as special, so they are kept whole and can be
    # skipped.
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )


def _added_token(entry: Any) -> tokenizers.AddedToken | None:
    text = _token_text(entry)
    if text is None or not isinstance(entry, Mapping):
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        text, **{name: bool(entry[name]) for name in flags if name in entry}
    )


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; "default" is the usual one. A template file next to tokenizer_config.json
    takes precedence over its entry."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    for name in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(name)
        entries = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(entries, list) and entries:
            return [text for text in map(_token_text, entries) if text is not None]
    return []


def _token_text(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _no_tokenizer_json(folder: Path) -> str:
    models = sorted(f.name for f in folder.iterdir() if f.suffix in (".model", ".spm"))
    models += [name for name in ("vocab.json", "merges.txt") if (folder / name).is_file()]
    found = f"found {', '.join(models)}, but no tokenizer.json" if models else "no tokenizer.json"
    message = f"cannot load a tokenizer from {folder}: {found}; this engine reads tokenizer.json"
    how = (
        'python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
    if "tokenizer.model" in models:
        how = f"fastdeploy tokenizer convert --model {folder} (in fd-tools[sentencepiece])"
    return f"{message}; convert it once: {how}" if models else message
