"""The tokenizer of one model: text to ids, ids to text, conversations to prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from fastdeploy_core.errors import ConfigError, InvalidRequest

from .chat_template import (
    ChatTemplate,
    TemplateRefusal,
    check_template_kwargs,
    cut_at_mark,
    mark_final_message,
    plain_data,
    prepare_messages,
)
from .decoder_steps import (
    CACHED_TOKENS,
    byte_level_bytes,
    describe_decoder,
    fallback_byte,
    finish,
    make_steps,
    prime,
    push,
)
from .files import NAMED_TOKENS, TokenizerFiles, load_backend, read_files
from .special_text import MarkedText, SpecialText

FIRST_PIECE_CHARS = 128 * 1024
CUT_TOKENS = 256


class Tokenizer:
    """One model's tokenizer. Thread safe: load() is the last change."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        files: TokenizerFiles,
        *,
        trust_special_tokens: bool = False,
    ) -> None:
        self._backend = backend
        self._special_text = None if trust_special_tokens else SpecialText(backend)
        self._files = files
        self.path: Path = files.path
        vocabulary = backend.get_vocab(with_added_tokens=True)
        # Ids are 0 to vocab_size - 1; some of them may have no token.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        for name in NAMED_TOKENS:
            text = files.named_tokens.get(name)
            setattr(self, name, text)
            setattr(self, f"{name}_id", None if text is None else backend.token_to_id(text))
        own = [] if self.eos_token_id is None else [self.eos_token_id]
        # All ids that end an answer, the tokenizer's own first.
        self.eos_token_ids: list[int] = list(dict.fromkeys([*own, *files.eos_token_ids]))
        self.chat_template: str | None = files.chat_templates.get("default")
        self.decoder_settings = describe_decoder(backend.decoder)
        self._is_byte_level = any(s["type"] == "ByteLevel" for s in self.decoder_settings)
        self._texts: dict[int, str] = {}
        self._string = functools.lru_cache(CACHED_TOKENS)(backend.id_to_token)

    # NAMED_TOKENS and their ids are set by name in __init__; None: the model has no such token.
    eos_token_id: int | None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        chat_template: str | None = None,
        trust_special_tokens: bool = False,
    ) -> Self:
        """Read a tokenizer folder. `chat_template`: text that replaces the model's own template.
        `trust_special_tokens`: those in users' text act as the template's own."""
        files = read_files(path)
        if chat_template is not None:
            files.chat_templates = {"default": chat_template}
        for name, source in files.chat_templates.items():
            try:
                _compiled(source)
            except TemplateRefusal as error:
                raise ConfigError(f"chat template {name!r} of {files.path}: {error}") from error
        return cls(load_backend(files), files, trust_special_tokens=trust_special_tokens)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens such as <s> are added as the model's files say."""
        if isinstance(text, MarkedText) and self._special_text is not None:
            return self._special_text.encode(text, add_special_tokens)
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_end(
        self, text: str, room: int, max_chars: int, *, keeps_end: bool, add_special_tokens: bool
    ) -> list[int]:
        """All token ids of a text; of one with more tokens than there is room for, or with more
        characters than max_chars, more than enough of those at one end. So a text that is refused
        or cut costs about as much as one that fits."""
        size = FIRST_PIECE_CHARS
        while True:
            piece = text
            if size < len(text):
                if isinstance(text, MarkedText):
                    piece = text.end(size, keeps_end)
                else:
                    piece = text[-size:] if keeps_end else text[:size]
            ids = self.encode(piece, add_special_tokens) if text else []
            # The tokens next to a cut may differ from those of the whole text.
            if size >= min(len(text), max_chars) or len(ids) > room + CUT_TOKENS:
                return ids
            size = min(4 * size, max_chars)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Several texts at once, on several cores."""
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(
                "the prompt must be text without lone surrogates", param="prompt"
            ) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids without a token are left out."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequest(
                "token ids must be integers from 0 up", param="token_ids"
            ) from None

    def token_text(self, token_id: int) -> str:
        """The text of one token in the middle of a text (a leading space is kept)."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._single_text(token_id)
        return text

    def _single_text(self, token_id: int) -> str:
        token = self.token_string(token_id)
        if token is None:
            return ""
        steps = make_steps(self.decoder_settings)
        prime(steps, ["x"])  # so that the token is not the first of the text
        return push(steps, [token]) + finish(steps)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, even if they are only part of a character."""
        token = self.token_string(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(token)
        byte = fallback_byte(token)
        return self.token_text(token_id).encode() if byte is None else bytes([byte])

    def token_string(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (such as "Ġthe"); None for an id without a token."""
        try:
            return self._string(token_id)
        except (OverflowError, TypeError):
            return None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def tokenizer_json(self) -> Path:
        """The file that grammar backends read."""
        return self.path / "tokenizer.json"

    def description(self) -> dict[str, Any]:
        """What clients that make prompts themselves need: tokenizer_config.json, the special tokens
        as text and the chat template in use. No path of this machine."""
        config = {k: v for k, v in self._files.config.items() if k != "name_or_path"}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        template = self._files.chat_templates.get("default")
        return {**config, **self._files.named_tokens, "chat_template": template}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        render: Callable[[str, Mapping[str, Any]], str] | None = None,
        kinds: Sequence[str] = (),
    ) -> str:
        """The prompt of a conversation; InvalidRequest says what is wrong with it.

        `template_kwargs`: a request's chat_template_kwargs, checked against the names that the
        template reads. `chat_template`: one that a request brings. `render`: renders it from its
        source and variables, under limits (part `request-templates`); None: it is trusted.
        `kinds`: of parts beside text that messages may have, as engine.media.take_media leaves
        them.
        Encode the prompt with add_special_tokens=False, because the template writes special tokens.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        own: ChatTemplate | None = None
        if chat_template is not None and render is not None:
            write: Callable[[dict[str, Any]], str] = functools.partial(render, chat_template)
        else:
            own = (
                self._own_template(bool(tools)) if chat_template is None else _given(chat_template)
            )
            write = own.render
        keeps = own is not None and own.reads_parts
        prepared = prepare_messages(messages, keep_parts=keeps, kinds=kinds)
        mark = self._special_text.mark if self._special_text else lambda value: value
        role = own.role if own is not None else str
        # roles come from a short list, and templates write special tokens with them
        prepared = [{**mark(message), "role": role(message["role"])} for message in prepared]
        final = mark_final_message(prepared) if continue_final_message else ""
        variables = {
            **mark(check_template_kwargs(template_kwargs or {}, own.variables if own else None)),
            **self._files.named_tokens,
            "messages": prepared,
            "tools": mark(plain_data(list(tools))) if tools else None,
            "documents": mark(plain_data(list(documents))) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = write(variables)
        except TemplateRefusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        if continue_final_message:
            rendered = cut_at_mark(rendered, final)
        return self._special_text.unmark(rendered) if self._special_text else rendered

    def _own_template(self, with_tools: bool) -> ChatTemplate:
        templates = self._files.chat_templates
        source = templates.get("tool_use") if with_tools else None
        source = source or templates.get("default")
        if source is None:
            raise InvalidRequest(
                "this model has no chat template, so it takes prompts and no messages; the "
                "operator can give one with --chat-template",
                param="messages",
            )
        return _compiled(source)


def _given(source: str) -> ChatTemplate:
    try:
        return _compiled(source)
    except TemplateRefusal as error:
        raise InvalidRequest(str(error), param="chat_template") from error


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> ChatTemplate:
    # Only templates of models and operators are compiled here: few, and chosen by no request.
    return ChatTemplate(source)
