"""The offline API: `LLM(model).generate(...)` and `.chat(...)`, with the engine in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastdeploy_core import errors
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.input import RequestLimits, build_request, default_sampling_values
from fastdeploy_core.engine.output import OutputKind, OutputProcessor
from fastdeploy_core.errors import ConfigError, InvalidRequest, WorkerError
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import Request, RequestOutput, SamplingParams

from .answers import AnswerParsers
from .inputs import Prompt, Prompts, conversations, normalise_prompts, one_each
from .progress import Progress

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None


class _Batch:
    """The requests of one call: where their outputs go until it takes them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.order = {request.request_id: i for i, request in enumerate(requests)}
        self.open = set(self.order)
        self.ready: list[RequestOutput] = []

    def deliver(self, output: RequestOutput) -> None:
        self.ready.append(output)
        if output.finished:
            self.open.discard(output.request_id)

    def take(self) -> list[RequestOutput]:
        ready, self.ready = self.ready, []
        return ready


class LLM:
    """A model loaded into this process. Use as a context manager, or call close().

    `engine_args` are the server's engine arguments as keywords, in FastDeploy's or vLLM's spelling;
    an unknown one raises ConfigError with the nearest valid name. Not thread safe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        skip_tokenizer_init: bool = False,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        **engine_args: Any,
    ) -> None:
        self.config = build_engine_config({"model": str(model), **engine_args})
        self._parsers = AnswerParsers.named(reasoning_parser, tool_call_parser)
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = Tokenizer.load(
                self.config.model.tokenizer_path, chat_template=self.config.model.chat_template
            )
        self._processor = OutputProcessor(self._tokenizer)
        self._batches: dict[str, _Batch] = {}  # request id to the call it belongs to
        self._compiler: GrammarCompiler | None = None
        self._engine: LocalEngine | None = LocalEngine(self.config, _resolve(self.config))
        self._limits = RequestLimits.of(self.config, self._tokenizer, self._engine.info)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        stream: bool = False,
        *,
        priority: Priority = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue prompts; outputs come in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}.
        `sampling_params`: one for all, or a list with one for each; None: what the model's
        generation_config.json says, up to the end of the context. With stream=True the result is an
        iterator of new pieces instead: each RequestOutput holds only what was added.
        """
        return self._run(normalise_prompts(prompts), sampling_params, use_tqdm, stream, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: bool = False,
        priority: Priority = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one conversation or a list of them. With parsers named at construction, outputs
        carry `reasoning_content` and `tool_calls`, and `text` is what remains."""
        tokenizer = self.get_tokenizer()
        if continue_final_message:
            add_generation_prompt = False
        prompts = []
        for conversation in conversations(messages):
            text = tokenizer.apply_chat_template(
                conversation,
                tools,
                add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
                trusted=True,  # it comes from this program, not from a client
            )
            # The template writes the special tokens: adding them again would double <s>.
            prompts.append(Prompt(text, add_special_tokens=False))
        parsers = self._parsers.prepare(tools, chat_template_kwargs)
        return self._run(prompts, sampling_params, use_tqdm, stream, priority, parsers)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ConfigError when the LLM was made without one."""
        if self._tokenizer is None:
            raise ConfigError("this LLM was made with skip_tokenizer_init=True; it has no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What sampling_params=None means for this model."""
        return SamplingParams(**default_sampling_values(self.config.model.generation_config))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False while requests are running."""
        return self._live_engine().reset_prefix_cache()

    def get_metrics(self) -> dict[str, Any]:
        """The engine's gauges and counters."""
        stats = self._live_engine().stats()
        return {name: getattr(stats, name) for name in stats.__struct_fields__}

    def close(self) -> None:
        """End everything this LLM started and give its memory back; may be called again."""
        engine, self._engine = self._engine, None
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close()
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        stream: bool,
        priority: Priority,
        parsers: AnswerParsers | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        params = one_each("sampling_params", sampling_params, len(prompts))
        default = self.get_default_sampling_params() if None in params else None
        priorities = one_each("priority", priority, len(prompts))
        # Every request is checked before the first one is handed to the engine.
        requests = [
            self._build(prompt, param or default, rank or 0)
            for prompt, param, rank in zip(prompts, params, priorities, strict=True)
        ]
        texts = [prompt.text for prompt in prompts]
        if stream:
            return self._stream(requests, texts, parsers)
        return self._collect(requests, texts, use_tqdm, parsers)

    def _build(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> Request:
        assert params is not None
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                param="sampling_params",
            )
        if params.structured_outputs is not None and self._compiler is None:
            if self._tokenizer is None:
                raise InvalidRequest(
                    "structured outputs need a tokenizer", param="structured_outputs"
                )
            self._compiler = GrammarCompiler.start(
                self.config.model.tokenizer_path,
                vocab_size=self._limits.vocab_size,
                eos_token_ids=self._limits.eos_token_ids,
                config=self.config.structured_outputs,
            )
        return build_request(
            prompt.token_ids if prompt.token_ids is not None else prompt.text or "",
            params,
            tokenizer=self._tokenizer,
            limits=self._limits,
            compiler=self._compiler,
            add_special_tokens=prompt.add_special_tokens,
            priority=priority,
            cache_salt=prompt.cache_salt,
        )

    def _collect(
        self,
        requests: Sequence[Request],
        texts: Sequence[str | None],
        use_tqdm: bool,
        parsers: AnswerParsers | None,
    ) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(requests)
        with Progress(len(requests), use_tqdm) as progress:
            for output in self._outputs(requests, texts, OutputKind.FINAL, parsers):
                results[self._place(requests, output)] = output
                progress.finished(output)
        return [output for output in results if output is not None]
