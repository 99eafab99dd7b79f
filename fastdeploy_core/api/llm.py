"""The offline API: `LLM(model).generate(...)` and `.chat(...)`, with the engine in this process."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.input import (
    RequestLimits,
    RequestOptions,
    build_request,
    default_sampling_values,
    grammar_start,
)
from fastdeploy_core.engine.media import MEDIA_THREADS, media_processor, take_media
from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import ConfigError, InvalidRequest, WorkerError, error_named
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.plugins.checkpoints import find_model
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import (
    LoRARequest,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokenDeltas,
)

from .chat_reader import ChatParsers, ChatReader
from .inputs import Prompt, Prompts, conversations, normalise_prompts, one_each

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None
LoRA = LoRARequest | Sequence[LoRARequest | None] | None


class Batch:
    """The requests of one call, and their outputs until the call takes them."""

    def __init__(self, requests: Iterator[Request], texts: Sequence[str | None]) -> None:
        self.requests, self.texts = requests, texts
        self.ahead: Sequence[Future[Request]] = ()  # those that threads build
        self.order: dict[str, int] = {}  # of those that the engine was given: their places
        self.open: set[str] = set()
        self.ready: list[RequestOutput] = []

    def has_more(self) -> bool:
        # Steps of many rows leave threads that build their share of the interpreter.
        is_built = not self.ahead or self.ahead[0].done() or len(self.open) < MEDIA_THREADS
        return is_built and len(self.order) < len(self.texts)

    def add(self, request: Request) -> None:
        self.open.add(request.request_id)
        self.order[request.request_id] = len(self.order)

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

    tokenizer_class: type[Tokenizer] = Tokenizer

    def __init__(
        self,
        model: str | Path,
        *,
        skip_tokenizer_init: bool = False,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        **engine_args: Any,
    ) -> None:
        self.config = build_engine_config({"model": str(model), **engine_args}, find_model)
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = self.tokenizer_class.load(
                self.config.model.tokenizer_path,
                chat_template=self.config.model.chat_template,
                trust_special_tokens=self.config.model.trust_special_tokens,
            )
        self._processor = OutputProcessor(self._tokenizer)
        self._batches: dict[str, Batch] = {}  # request id to the call it belongs to
        self._compiler: GrammarCompiler | None = None
        with ThreadPoolExecutor(1, "fd-parsers") as pool:  # a third party's take a while to import
            parsers = pool.submit(ChatParsers.named, reasoning_parser, tool_call_parser)
            self._resolved = resolve_plugins(self.config)
        self._parsers = parsers.result()
        self._engine: LocalEngine | None = LocalEngine(self.config, self._resolved)
        self._media = media_processor(self.config, self._resolved, is_trusted=True)
        self._limits = RequestLimits.of(self.config, self._tokenizer, self._engine.info)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        stream: bool = False,
        *,
        lora_request: LoRA = None,
        priority: Priority = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue prompts; outputs come in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...}, to a
        model that takes pictures also with "multi_modal_data": {"image": one or a list}, and in the
        text a placeholder for each.
        `sampling_params`: one for all, or a list with one for each; None: what the model's
        generation_config.json says, up to the end of the context. With stream=True the result is an
        iterator of new pieces instead: each RequestOutput holds only what was added.
        `lora_request`: the adapter, one for all or one or None for each; needs enable_lora=True.
        """
        asked = (sampling_params, use_tqdm, stream, priority, lora_request)
        return self._run(normalise_prompts(prompts), *asked)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRA = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        stream: bool = False,
        priority: Priority = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one conversation or a list of them. With parsers named at construction, outputs
        carry `reasoning_content` and `tool_calls`, and `text` is what remains."""
        tokenizer = self.get_tokenizer()
        if continue_final_message:
            add_generation_prompt = False
        prompts = []
        kinds = () if self._media is None else self._media.kinds
        for given in conversations(messages):
            conversation, parts = take_media(given, kinds, mm_processor_kwargs)
            text = tokenizer.apply_chat_template(
                conversation,
                tools,
                add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
                kinds=kinds,
            )
            # The template writes the special tokens; adding them again would double <s>.
            prompts.append(Prompt(text, add_special_tokens=False, media=parts))
        reader = None
        if self._parsers is not None:
            reader = ChatReader(self._parsers, tools, chat_template_kwargs)
        return self._run(prompts, sampling_params, use_tqdm, stream, priority, lora_request, reader)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ConfigError when the LLM was made without one."""
        if self._tokenizer is None:
            raise ConfigError(
                "this LLM was made with skip_tokenizer_init=True; it has no tokenizer"
            )
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
        if self._media is not None:
            self._media.close()
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # which still finds names that there are not

        def __getattr__(self, name: str) -> Any:
            """Methods that the model's family adds (contracts.small.PoolingLM)."""
            family = None
            if name == "beam_search":
                return partial(part("beam-llm", "beam_search"), self)
            if not name.startswith("_"):
                family = self._resolved.load("model", self.config.model.architecture)
            methods = family.methods() if hasattr(family, "methods") else {}
            if family is not None and self.config.rollout:
                methods = {**methods, **part("rollout-llm", "enable_rollout=True")}
            if name not in methods:
                raise AttributeError(f"LLM has no {name}; embed and such need runner='pooling'")
            return partial(methods[name], self)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        stream: bool,
        priority: Priority,
        lora_request: LoRA,
        reader: ChatReader | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        params = one_each("sampling_params", sampling_params, len(prompts))
        default = self.get_default_sampling_params()
        priorities = one_each("priority", priority, len(prompts))
        adapters = one_each("lora_request", lora_request, len(prompts))
        make: Any = part("lora-request", "lora_request") if any(adapters) else None
        some = {one: make(one.lora_name, one.lora_path, self.config) for one in {*adapters} if one}
        for prompt, lora in zip(prompts, adapters, strict=True):
            prompt.extras = some[lora] if lora else prompt.extras
        given = [default if param is None else param for param in params]
        each = zip(prompts, given, [rank or 0 for rank in priorities], strict=True)
        requests = (self._build(*one, reader) for one in each)
        batch = Batch(requests, [prompt.text for prompt in prompts])
        if any(prompt.media for prompt in prompts):  # files are waited for
            threads = ThreadPoolExecutor(MEDIA_THREADS)
            ahead = deque(threads.submit(self._build, *one, reader) for one in each)
            threads.shutdown(wait=False)
            batch.ahead, batch.requests = ahead, (ahead.popleft().result() for _ in prompts)
        if not stream:
            return self._collect(batch, use_tqdm, reader)
        try:  # what is wrong with any of them is said now
            batch.requests = iter([*batch.requests])
        finally:
            for future in batch.ahead:
                future.cancel()
        return (output for _, output in self._outputs(batch, is_whole=False, reader=reader))

    def _build(
        self, prompt: Prompt, params: SamplingParams, priority: int, reader: ChatReader | None
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                param="sampling_params",
            )
        if prompt.media and self._media is None:
            raise InvalidRequest(
                f"{self.config.model.architecture} takes text only; "
                f"{prompt.media[0].where} cannot be served",
                param="prompts",
            )
        request = build_request(
            prompt.token_ids if prompt.token_ids is not None else prompt.text or "",
            params,
            tokenizer=self._tokenizer,
            limits=self._limits,
            options=RequestOptions(
                add_special_tokens=prompt.add_special_tokens,
                truncation=prompt.truncation,
                priority=priority,
                cache_salt=prompt.cache_salt,
                media=self._media,
                media_parts=prompt.media,
                extras=prompt.extras,
            ),
        )
        if params.structured_outputs is not None:
            self._add_grammar(request, params.structured_outputs)
            if reader is not None:
                thinking = reader.thinking_ahead(prompt.text or "")
                request.grammar_start = grammar_start(thinking, self.get_tokenizer())
        return request

    def _add_grammar(self, request: Request, asked: StructuredOutputsParams) -> None:
        if self._compiler is None:
            if self._tokenizer is None:
                raise InvalidRequest(
                    "structured outputs need a tokenizer", param="structured_outputs"
                )
            self._compiler = GrammarCompiler.start(
                self.config.model.tokenizer_path,
                self._resolved.grammar,
                vocab_size=self._limits.vocab_size,
                eos_token_ids=self._limits.eos_token_ids,
                config=self.config.structured_outputs,
            )
        request.grammar = self._compiler.compile(asked)
        request.grammar_backend = self._compiler.backend

    def _collect(
        self, batch: Batch, use_tqdm: bool, reader: ChatReader | None
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        results: dict[int, RequestOutput] = {}
        texts, num_read, num_written = batch.texts, 0, 0
        silent = not (use_tqdm and texts)
        with tqdm(total=len(texts), desc="Processed prompts", disable=silent) as bar:
            for place, output in self._outputs(batch, is_whole=True, reader=reader):
                results[place] = output
                if not silent:
                    num_read += len(output.prompt_token_ids)
                    num_written += sum(len(answer.token_ids) for answer in output.outputs)
                    took = max(bar.format_dict["elapsed"], 1e-9)
                    rates = f"input: {num_read / took:.1f}, output: {num_written / took:.1f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
        return [results[place] for place in range(len(texts))]

    def _outputs(
        self, batch: Batch, is_whole: bool, reader: ChatReader | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """(place, output) as they come: the engine gets what its next step needs, and the others
        while the device works. However it ends, none stays in the engine."""
        engine, limits = self._live_engine(), self.config.batch
        visible = reader.visible_tokens if reader else ()
        room, seats = float(limits.max_num_batched_tokens), float(limits.max_num_seqs)
        if limits.policy == "priority":  # the engine has to know all
            room = seats = float("inf")
        given, most = 0, room  # prompt tokens, and how many to give before the next step
        collects = gc.isenabled()
        gc.disable()  # prompts are young and long: looking at them would keep the device waiting

        def give() -> int:
            request, text = next(batch.requests), batch.texts[len(batch.order)]
            batch.add(request)
            self._batches[request.request_id] = batch
            self._processor.add(request, text, is_whole=is_whole, visible_tokens=visible)
            engine.add(request)
            return len(request.prompt_token_ids)

        try:
            while batch.open or batch.ready or batch.has_more():
                with _interrupts_wait():
                    while batch.has_more() and (
                        not batch.open or (given < most and len(batch.open) < seats)
                    ):
                        given += give()
                    if batch.has_more() and engine.begin():
                        most = given + room
                    else:
                        while batch.has_more() and engine.is_busy():
                            given += give()
                        if not batch.ready:
                            self._step(engine)
                if collects:  # from here on it is the caller's again
                    gc.enable()
                    collects = False
                for output in batch.take():
                    _raise_refusal(output)
                    yield batch.order[output.request_id], reader.read(output) if reader else output
        finally:
            if collects:
                gc.enable()
            for future in batch.ahead:
                future.cancel()
            for request_id in batch.order:
                self._batches.pop(request_id, None)
                self._processor.remove(request_id)
            if self._engine is not None:
                with _interrupts_wait():
                    engine.abort(list(batch.open))
                    self._settle(engine)

    def _step(self, engine: LocalEngine) -> None:
        """One step of the engine; outputs go to the calls they belong to."""
        if not engine.has_work():
            raise WorkerError("the engine has lost a request: it has no work, but an answer is due")
        for step_output in engine.step():
            if isinstance(step_output, TokenDeltas):
                deltas = self._processor.collect(step_output)
            else:
                deltas = [step_output]
            for delta in deltas:
                output, aborts = self._processor.process(delta)
                if aborts:
                    engine.abort(aborts)
                if output is not None:
                    self._batches[delta.request_id].deliver(output)

    def _settle(self, engine: LocalEngine) -> None:
        """After aborts: take the step in flight, which frees the aborted requests' blocks."""
        try:
            while not self._batches and engine.has_work():
                self._step(engine)
        except WorkerError:
            logger.debug("the engine is dead; nothing is left to settle", exc_info=True)

    def _live_engine(self) -> LocalEngine:
        if self._engine is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._engine


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect after the block, since the engine would lose KV blocks in the middle of
    its bookkeeping; a second one takes effect at once, since a device may hang."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []

    def note(*given: Any) -> None:
        came.append(given)
        if len(came) > 1:
            before(*given)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(came) == 1:
            before(*came[0])


def _raise_refusal(output: RequestOutput) -> None:
    """Raise if the engine refused the request: that ends the whole call. A request that fails while
    it runs ends alone, as an output with finish_reason "error"."""
    if output.error is None:
        return
    error = error_named(output.error_type, output.error)
    if isinstance(error, InvalidRequest):
        raise error
    logger.warning("request %s failed: %s", output.request_id, output.error)
