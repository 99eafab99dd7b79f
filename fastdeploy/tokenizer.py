"""A model's tokenizer with the names that Hugging Face's have: FastDeploy 2.x's and vLLM's programs
call what LLM.get_tokenizer() returns by those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fastdeploy_core import tokenizer as core
from fastdeploy_core.api.inputs import conversations
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.plugins.checkpoints import find_model

_MEDIA = ("image", "video")
_OF_CORE = ("continue_final_message", "documents", "template_kwargs", "chat_template", "render")
# What transformers' apply_chat_template may be told of token ids.
_OF_IDS = ("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs")


class Encoding(dict[str, Any]):
    """Token ids as transformers returns them: by key or by attribute."""

    __getattr__ = dict.__getitem__


class Tokenizer(core.Tokenizer):
    """The core's tokenizer. Unlike Hugging Face's, apply_chat_template returns text unless it is
    told tokenize=True, and asks for an answer unless it is told add_generation_prompt=False."""

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | None = None,
        use_fast: bool = True,
        trust_remote_code: bool = False,
    ) -> Self:
        """Of a folder, or of a model that is named, which fd-hub downloads. Code of a model is
        never run, and there is one kind of tokenizer."""
        path = Path(name).expanduser()
        if not path.is_dir():
            path = find_model(
                path, {"revision": revision, "download_dir": cache_dir}
            ).tokenizer_path
        return cls.load(path)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Encoding:
        """input_ids and attention_mask, of each text where there are several."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        ids = self.encode_batch(text, add_special_tokens)
        return Encoding(input_ids=ids, attention_mask=[[1] * len(one) for one in ids])

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """The text of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> Any:
        """The vocabulary's spelling of a text's tokens."""
        return self.convert_ids_to_tokens(self.encode(text, False))

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The vocabulary's spelling of an id, or of each."""
        one = isinstance(ids, int)
        return self.token_string(ids) if one else [self.token_string(each) for each in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each."""
        one = isinstance(tokens, str)
        return self.token_to_id(tokens) if one else [self.token_to_id(each) for each in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        kinds: Sequence[str] = _MEDIA,
        tokenize: bool = False,
        return_dict: bool = False,
        **more: Any,
    ) -> Any:
        """The prompt of a conversation, or of each of several. `more`: what else the core's takes,
        and values for the template, such as enable_thinking."""
        own = {name: more.pop(name) for name in _OF_CORE if name in more}
        for name in _OF_IDS:
            if more.pop(name, None):
                raise InvalidRequest(f"{name} is not supported; token ids are a list", param=name)
        own["template_kwargs"] = {**more, **(own.get("template_kwargs") or {})}
        asks = add_generation_prompt and not own.get("continue_final_message")
        talks = [[_with_places(m, kinds) for m in one] for one in conversations(messages)]
        make = super().apply_chat_template
        texts = [make(talk, tools, asks, kinds=kinds, **own) for talk in talks]
        given: Any = texts[0] if isinstance(messages[0], Mapping) else texts
        if not tokenize:
            return given
        encoding = self(given, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]


def _with_places(message: Any, kinds: Sequence[str]) -> Any:
    """A message whose pictures are the places where its template writes something for them."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message

    def place(part: Any) -> Any:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        kind = kind.removeprefix("input_").removesuffix("_url").removesuffix("_pil")
        return {"type": kind} if kind in kinds else part

    return {**message, "content": [place(part) for part in content]}
